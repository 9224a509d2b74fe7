"""Supervisor that restarts a failed query."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from keylane.errors import KeylaneError
from keylane.spark.failure_report import cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from keylane.spark.failure_report import QueryFailure

Q = TypeVar("Q")

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 30.0
"""Seconds before the first restart, doubled with every further failure up to the second value."""
HEALTHY_AFTER_SECONDS = 60.0
"""After this many seconds a query counts as healthy, and its failure as a new one."""
_POLL_SECONDS = 0.1


def supervise(
    start: Callable[[], Q],
    watch: Callable[[Q], BaseException | None],
    *,
    say: Callable[[str], None],
    asked: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> QueryFailure | None:
    """Start a query and watch it until it ends; restart it after a failure if that may help.

    ``watch`` returns the query's failure, or None if it ended by itself or a stop was ``asked`` for. Returns None in
    these cases too, otherwise the final failure. Errors other than those of Spark, Kafka or the app are bugs, and
    are raised.
    """
    in_a_row, wait = 0, FIRST_WAIT_SECONDS
    while True:
        began: float | None = None
        error: BaseException | None
        try:
            query = start()
            began = clock()
            error = watch(query)
        except (KeylaneError, PySparkException, Py4JError, ConnectionError) as raised:
            error = raised
        if error is None:
            return None
        failure = cause(error)
        if failure.final or asked():
            return failure
        if began is not None and clock() - began >= HEALTHY_AFTER_SECONDS:
            in_a_row, wait = 0, FIRST_WAIT_SECONDS
        in_a_row += 1
        say(f"the query failed: {failure.line}. Restarting it in {wait:g} s (failure {in_a_row} in a row)")
        until = clock() + wait
        while (left := until - clock()) > 0:
            if asked():
                return None
            sleep(min(left, _POLL_SECONDS))
        wait = min(2 * wait, LONGEST_WAIT_SECONDS)
