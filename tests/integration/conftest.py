"""A real broker and a real Spark, started once for all integration tests, and what they need around them."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from keylane.broker import Broker
from keylane.spark import session
from keylane.testing import Sent, Verdict, check, read_history
from support.topics import Log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)


_status: list[int] = []


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        # A worker of xdist: the last of its exit handlers, for the reason given below.
        atexit.register(os._exit, 0)


def pytest_sessionfinish(exitstatus: int) -> None:
    _status.append(int(exitstatus))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process with the tests' result, without what C libraries do at its end.

    Tests leave Kafka clients behind. With some alive, the cleanup of the OpenSSL inside librdkafka 2.16.0 may look at a
    thread that is gone (``init_thread_deregister``): a segmentation fault after the last test had passed, seen once.
    """
    if not _status or hasattr(config, "workerinput"):
        return  # no test was to run, or a worker of xdist, which has to say first that it has finished
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status[-1])


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    # Nothing goes by its age: tests make up the times of their messages.
    with Broker(settings={"log.retention.ms": -1}) as running:
        yield running


@pytest.fixture(scope="session")
def log(broker: Broker) -> Log:
    return Log(broker.bootstrap)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    running = session("local[2]", "keylane tests", lanes_only=True)
    try:
        yield running
    finally:
        running.stop()


_numbers = itertools.count()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name no other test uses: of the app and, with a suffix, of its topics."""
    return f"t{next(_numbers)}-{request.node.originalname[5:40].replace('_', '-')}"


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., Verdict]:
    """Judges what the observer wrote into ``tmp_path / 'history'``."""

    def judged(sent: list[Sent], **more: Any) -> Verdict:
        verdict = check(read_history(tmp_path / "history"), sent=sent, **more)
        verdict.raise_if_bad()
        return verdict

    return judged
