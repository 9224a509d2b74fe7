"""What Spark says when it gives up on a query. The reports are of real failures; only paths were changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import AnalysisException

from keylane.errors import BrokerError, FailureGuardError, FencedError, SettingsError, TakenOverError
from keylane.spark.failure_report import QueryFailureKind, cause

REPORTS = Path(__file__).with_name("reports")

CAPTURED = {
    "worker_killed": (
        QueryFailureKind.AGAIN,
        "a Python worker ended unexpectedly, 4 times in a row: killed, out of memory, or crashed in native code",
    ),
    "planner_killed": (
        QueryFailureKind.AGAIN,
        "Spark gave no reason; its planner process, or one of its own threads, has died",
    ),
    "context_stopped": (QueryFailureKind.AGAIN, "Job 1 cancelled because SparkContext was shut down"),
    "planner_without_broker": (
        QueryFailureKind.AGAIN,
        (
            "no Kafka broker answered at 127.0.0.1:29689 within 10 s (Failed to get metadata: Local: Broker transport "
            "failure). Is it running, and is the address right? 'keylane broker start' starts one on this machine"
        ),
    ),
    "task_without_broker": (
        QueryFailureKind.AGAIN,
        "topic 'broker.state' gives no answer; its partitions [1, 3] were not read to the end",
    ),
    "resource_not_opened": (
        QueryFailureKind.AGAIN,
        "resource 'db' of app 'resource' could not be opened: OSError: the database said no",
    ),
    "module_missing": (
        QueryFailureKind.APP,
        (
            "'nosuch_shop:app': there is no module 'nosuch_shop' here. It is looked for in the current folder and in "
            "the installed packages"
        ),
    ),
    "module_broken": (
        QueryFailureKind.APP,
        "'broken_shop:app': module 'broken_shop' does not import: ZeroDivisionError: division by zero",
    ),
    "pickled_needs_module": (
        QueryFailureKind.APP,
        (
            "the app needs a module that is not there on the worker: No module named 'gone_helper'. Install it there, "
            "or ship it with the job (spark-submit --py-files)"
        ),
    ),
    "no_keylane_on_workers": (QueryFailureKind.APP, "ModuleNotFoundError: No module named 'keylane'"),
    "settings": (
        QueryFailureKind.APP,
        "the Kafka client refused its settings: No such configuration property",
    ),
    "no_such_sink": (
        QueryFailureKind.APP,
        (
            "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: nosuch. Make sure the provider name is correct "
            "and the package is properly registered and compatible with your Spark version."
        ),
    ),
    "flood": (
        QueryFailureKind.FAILURE_GUARD,
        (
            "app 'flood' stopped: the last 50 messages, from 50 lanes, failed for good without a success "
            "(FailureGuard(consecutive=50)). That is an outage or a bug, not a few bad messages, so no more dead "
            "letters are written. The last: flood.in/1/49, stage 'work': ValueError: no. Mend the cause and start the "
            "app again: it goes on with this message; 'keylane dlq redrive flood --all' runs the letters again"
        ),
    ),
    "taken_over": (QueryFailureKind.TAKEN_OVER, "another run of app 'takenover' has taken over, at 12:00:00"),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_a_report_comes_down_to_one_line(name: str) -> None:
    found = cause(Exception((REPORTS / f"{name}.txt").read_text()))
    assert (found.kind, found.line) == CAPTURED[name]
    assert found.final is (found.kind is not QueryFailureKind.AGAIN)
    assert bool(found.remedy) is found.final


def test_every_report_is_judged() -> None:
    assert {path.stem for path in REPORTS.iterdir()} == set(CAPTURED)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BrokerError("no answer"), QueryFailureKind.AGAIN),
        (FencedError("another task"), QueryFailureKind.AGAIN),
        (SettingsError("refused"), QueryFailureKind.APP),
        (FailureGuardError("too many"), QueryFailureKind.FAILURE_GUARD),
        (TakenOverError("another run"), QueryFailureKind.TAKEN_OVER),
        (AnalysisException("[PATH_NOT_GIVEN] a path is needed"), QueryFailureKind.APP),
    ],
)
def test_errors_raised_while_the_query_starts(error: Exception, kind: QueryFailureKind) -> None:
    found = cause(error)
    assert found.kind is kind
    assert found.line == str(error)


@pytest.mark.parametrize(
    "error",
    [
        Py4JNetworkError("Answer from Java side is empty"),
        ConnectionRefusedError(111),
        Py4JError("An error occurred while calling o119.isActive"),
    ],
)
def test_a_lost_connection_is_a_lost_jvm(error: Exception) -> None:
    found = cause(error)
    assert found.kind is QueryFailureKind.AGAIN
    assert "Spark's JVM ended" in found.line


def test_error_answer_is_not_a_lost_connection() -> None:
    trace = "An error occurred while calling o1.x. Trace:\npy4j.Py4JException: Method x([]) does not exist\n\tat py4j\n"
    assert "JVM is gone" not in cause(Py4JError(trace)).line


ABORTED = """\
Job aborted due to stage failure: Task 0 in stage 3.0 failed 4 times, most recent failure: Lost task 0.3 in stage 3.0 \
(TID 9) (10.0.0.7 executor 2): {why}
=== Streaming Query ===
Identifier: x
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "the query failed and gave no reason"),
        (
            ABORTED.format(why="java.io.IOException: No space left on device\n\tat org.apache.spark.X"),
            "a task failed 4 times on 10.0.0.7 executor 2: java.io.IOException: No space left on device",
        ),
        (
            ABORTED.format(
                why="org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
                '  File "x.py", line 1, in read\n    raise FailureGuardError(\n'
                "keylane.errors.FailureGuardError: most of them\nfail\n\n\tat org.apache.spark.X"
            ),
            "most of them",
        ),
        (
            'Traceback (most recent call last):\n  File "x.py", line 1\n    1 +\n      ^\nSyntaxError: invalid syntax',
            "SyntaxError: invalid syntax",
        ),
        ("Traceback (most recent call last):\n  File x\nKeyboardInterrupt\n SQLSTATE: 38000", "KeyboardInterrupt"),
        ("Traceback (most recent call last):", "the query failed and gave no reason"),
        ("x" * 5000, "x" * 999 + "…"),
    ],
)  # fmt: skip
def test_other_reports(text: str, line: str) -> None:
    assert cause(Exception(text)).line == line


def test_error_that_quotes_another_keeps_its_kind() -> None:
    text = (
        "Traceback (most recent call last):\n  File x\n"
        "keylane.errors.ResourceError: resource 'db' could not be opened: FailureGuardError: "
        "keylane.errors.FailureGuardError: no\n"
    )
    assert cause(Exception(text)).kind is QueryFailureKind.AGAIN


def test_unreadable_report_causes_no_second_failure() -> None:
    class UnreadableError(Exception):
        def __str__(self) -> str:
            raise ConnectionRefusedError(111)

    assert "Spark's JVM ended" in cause(UnreadableError()).line


def test_no_failure_needs_no_report() -> None:
    nothing: Any = None
    assert cause(nothing).line == "the query ended by itself"
