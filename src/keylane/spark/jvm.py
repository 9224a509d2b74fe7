"""Spark's JVM: whether it is alive, waiting for its tasks, and ending it with its workers."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from keylane.errors import SettingsError
from keylane.spark import stderr_filter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


def is_alive(spark: SparkSession) -> bool:
    """Return whether the session is usable: its JVM answers, and its context was not stopped."""
    try:
        return not _context(spark).isStopped()
    except Exception:  # whatever prevents an answer: the session is unusable
        return False


def running(spark: SparkSession) -> int:
    """Return the number of running tasks of all queries."""
    executors = _context(spark).statusTracker().getExecutorInfos()
    return sum(executor.numRunningTasks() for executor in executors)


def await_idle(spark: SparkSession, seconds: float) -> bool:
    """Wait until no task runs. False after the time-out.

    When Spark reports a query's end, its tasks that did not fail still run lanes. Spark interrupts them, and kills them
    after two seconds. A query that starts earlier may find them in the middle of a stage.
    """
    deadline = time.monotonic() + seconds
    quiet = 0
    while quiet < 2:  # Spark's count is delayed
        if time.monotonic() > deadline:
            return False
        quiet = 0 if running(spark) else quiet + 1
        time.sleep(0.1)
    return True


_launched: list[subprocess.Popen[bytes]] = []
_filters: list[subprocess.Popen[bytes]] = []
_LAST_WORDS_SECONDS = 1.0
"""Seconds to wait at the end for the workers' output."""


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Record the JVM that is started inside the block. PySpark returns it only when it is up, seconds later."""
    from pyspark import java_gateway  # noqa: PLC0415

    module: Any = java_gateway
    original = module.Popen

    def launch(*args: Any, **named: Any) -> Any:
        process = original(*args, **named)
        _launched[:] = [process]
        return process

    module.Popen = launch
    try:
        yield
    finally:
        module.Popen = original


@contextlib.contextmanager
def quieted() -> Iterator[None]:
    """Filter noise from the output of the JVM started inside the block, and of its workers."""
    from pyspark import java_gateway  # noqa: PLC0415

    module: Any = java_gateway
    original = module.Popen

    def launch(*args: Any, **named: Any) -> Any:
        if named.get("stderr") is not None:
            return original(*args, **named)
        command = [sys.executable, "-E", "-S", stderr_filter.__file__]
        # In its own session: Ctrl-C is for the driver, and the workers' last output comes after it.
        copying = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603 - this Python
        try:
            process = original(*args, **{**named, "stderr": copying.stdin})
        finally:
            if copying.stdin is not None:
                copying.stdin.close()  # the JVM has its own copy
        _filters[:] = [copying]
        return process

    module.Popen = launch
    try:
        yield
    finally:
        module.Popen = original


def end(seconds: float = 5.0) -> bool:
    """End the JVM that this process started, with its Python workers. False if this process started none.

    A running JVM is first asked, by closing its stdin, and killed after the time-out.
    """
    process = _process()
    if process is None and not _launched:
        return False
    if process is None:  # not up yet: it would not notice
        process = _launched[0]
        seconds = 0.0
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
    for copying in _filters:
        with contextlib.suppress(subprocess.TimeoutExpired):
            copying.wait(_LAST_WORDS_SECONDS)
    _filters.clear()
    return True


def discard(spark: SparkSession) -> None:
    """Discard an unusable session, so that the next one gets a new JVM.

    Raises :class:`SettingsError` if this process did not start the JVM, and so cannot start another.
    """
    from pyspark import SparkContext  # noqa: PLC0415 - the command line must not pay for it before it is needed
    from pyspark.sql import SparkSession  # noqa: PLC0415

    if not end():
        raise SettingsError(
            "Spark has ended, and this process did not start its JVM. Restart it with the program that did "
            "(spark-submit)"
        )
    context: Any = spark.sparkContext
    for _ in range(2):  # the first fails half way without an answer; the second cleans up the rest
        with contextlib.suppress(Exception):
            context.stop()
    shared: Any = SparkContext
    _launched.clear()
    shared._gateway = shared._jvm = shared._active_spark_context = None  # noqa: SLF001 - nothing public forgets a JVM
    sessions: Any = SparkSession
    sessions._instantiatedSession = sessions._activeSession = None  # noqa: SLF001


def silence(spark: SparkSession) -> None:
    """Suppress PySpark's traceback when the JVM dies: the supervisor reports what happened."""
    server: Any = spark.sparkContext._accumulatorServer  # noqa: SLF001 - it prints, whatever logging is set to
    server.handle_error = lambda *_: None
    logging.getLogger().addFilter(_is_not_py4j)


def _is_not_py4j(record: logging.LogRecord) -> bool:
    return record.msg != "Exception while sending command."  # logged to the root logger, with a traceback


def _context(spark: SparkSession) -> Any:
    return spark.sparkContext._jsc.sc()  # noqa: SLF001 - PySpark shows neither of what is asked here


def _process() -> Any:
    """Return the JVM's process if this process started it and it is up. PySpark may be only partly imported."""
    context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    return getattr(getattr(context, "_gateway", None), "proc", None)
