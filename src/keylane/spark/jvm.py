"""The JVM that Spark lives in: whether it does, when its tasks are over, and how it and all it started are ended."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from keylane.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


def is_alive(spark: SparkSession) -> bool:
    """Whether the session can run anything: its JVM answers, and its context was not stopped underneath it."""
    try:
        return not _context(spark).isStopped()
    except Exception:  # whatever stands between us and the answer: it is no session to go on with
        return False


def running(spark: SparkSession) -> int:
    """How many tasks run now, of whatever query."""
    executors = _context(spark).statusTracker().getExecutorInfos()
    return sum(executor.numRunningTasks() for executor in executors)


def await_idle(spark: SparkSession, seconds: float) -> bool:
    """Wait until no task runs any more. False when that takes longer.

    A query has ended when Spark says so; those of its tasks that did not fail have not. They are told, and after two
    seconds killed; until then they run lanes. A query that is started sooner may find them in the middle of a stage.
    """
    deadline = time.monotonic() + seconds
    quiet = 0
    while quiet < 2:  # Spark counts with a delay
        if time.monotonic() > deadline:
            return False
        quiet = 0 if running(spark) else quiet + 1
        time.sleep(0.1)
    return True


_launched: list[subprocess.Popen[bytes]] = []


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Note the JVM that is started meanwhile. PySpark hands it out only when it is up, seconds later."""
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


def end(seconds: float = 5.0) -> bool:
    """End the JVM that this process has started; its Python workers end with it. False when there was none of ours.

    One that is up is asked first, by closing what it reads from, and killed when that took longer than so many seconds.
    """
    process = _process()
    if process is None and not _launched:
        return False
    if process is None:  # not up yet: it would hear nothing
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
    return True


def discard(spark: SparkSession) -> None:
    """Let go of a session that is no use any more, so that the next one gets a JVM of its own.

    Raises :class:`SettingsError` when this process has not started the JVM, and cannot start another.
    """
    from pyspark import SparkContext  # noqa: PLC0415 - the command line must not pay for it before it is needed
    from pyspark.sql import SparkSession  # noqa: PLC0415

    if not end():
        raise SettingsError(
            "Spark has ended, and its JVM was not started by this process: a new one has to come from the program that "
            "started it (spark-submit)"
        )
    context: Any = spark.sparkContext
    for _ in range(
        2
    ):  # the first ends in an error half way, as nobody answers; the second ends what is left here
        with contextlib.suppress(Exception):
            context.stop()
    shared: Any = SparkContext
    _launched.clear()
    shared._gateway = shared._jvm = shared._active_spark_context = None  # noqa: SLF001 - nothing public forgets a JVM
    sessions: Any = SparkSession
    sessions._instantiatedSession = sessions._activeSession = None  # noqa: SLF001


def silence(spark: SparkSession) -> None:
    """No Python traceback in the terminal when the JVM dies: who watches it says what happened."""
    server: Any = spark.sparkContext._accumulatorServer  # noqa: SLF001 - it prints, whatever logging is set to
    server.handle_error = lambda *_: None
    logging.getLogger().addFilter(_is_not_py4j)


def _is_not_py4j(record: logging.LogRecord) -> bool:
    return record.msg != "Exception while sending command."  # said to the root logger, with a traceback


def _context(spark: SparkSession) -> Any:
    return spark.sparkContext._jsc.sc()  # noqa: SLF001 - PySpark shows neither of what is asked here


def _process() -> Any:
    """The JVM's process when it is ours and up. PySpark may not have been imported, or only in part."""
    context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    return getattr(getattr(context, "_gateway", None), "proc", None)
