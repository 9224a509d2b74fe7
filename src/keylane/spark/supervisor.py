"""Starting a query again when Spark has given up on it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from keylane.errors import KeylaneError
from keylane.spark.failure import cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from keylane.spark.failure import Failure

Q = TypeVar("Q")

FIRST, LONGEST = 1.0, 30.0
"""Seconds to wait before the first start after a failure; doubled with every further one, up to the second."""
HEALTHY = 60.0
"""A query that ran for so many seconds was well: its failure is a new one, not the last one again."""
_LOOK = 0.1


def supervise(
    start: Callable[[], Q],
    watch: Callable[[Q], BaseException | None],
    *,
    say: Callable[[str], None],
    asked: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Failure | None:
    """Start a query and watch it until it ends; start it again when it failed and that may help.

    ``watch`` returns what the query failed with, None when it ended by itself or because a stop was ``asked`` for.
    Returns None in these cases too, and else the failure that is not to be tried again. Whatever else the two raise
    than errors of Spark, Kafka or the app is a bug, and passed on.
    """
    in_a_row, wait = 0, FIRST
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
        if began is not None and clock() - began >= HEALTHY:
            in_a_row, wait = 0, FIRST
        in_a_row += 1
        say(
            f"the query failed: {failure.line}. It is started again in {wait:g} s (failure {in_a_row} in a row)"
        )
        until = clock() + wait
        while (left := until - clock()) > 0:
            if asked():
                return None
            sleep(min(left, _LOOK))
        wait = min(2 * wait, LONGEST)
