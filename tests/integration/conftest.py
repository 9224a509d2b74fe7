"""A real broker and a real Spark, started once for all integration tests, and what they need around them."""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from keylane.broker import Broker
from keylane.spark import session
from keylane.testing import Sent, Verdict, check, read_history
from keylane.worker import session as worker_session
from keylane.worker.session import WorkerSession
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
    thread that has ended (``init_thread_deregister``): a segmentation fault after the last test had passed, seen once.
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


@pytest.fixture(autouse=True)
def _close_clients(request: pytest.FixtureRequest) -> Iterator[None]:
    """Close the clients that worker sessions, ``log``, clusters and planners keep for an app after its last epoch.

    A session that the test drops, as a crash does, is closed too: Python never collects a client with a delivery
    report that was not polled.
    """
    kept: dict[int, WorkerSession] = {}
    keep = WorkerSession.keep_for_next_task

    def keep_noted(session: WorkerSession) -> None:
        kept[id(session)] = session
        keep(session)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerSession, "keep_for_next_task", keep_noted)
        yield
    worker_session._sessions.clear()
    while kept:
        kept.popitem()[1].close()
    if "log" in request.fixturenames:
        request.getfixturevalue("log").close_group_consumers()
    gc.collect()  # clusters and planners are in reference cycles


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
