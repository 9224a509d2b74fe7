"""Spark sessions configured for Keylane."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from keylane.cache import cache_folder
from keylane.errors import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_ATTEMPTS_MAX = 4

_PLAIN_FILES = {
    # Spark writes two small files between epochs, while every lane waits. With checksums and permissions, Hadoop runs
    # `chmod` twice for each: a tenth of a second per file.
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}


_FORGET = dict.fromkeys(
    (
        "spark.ui.retainedJobs",
        "spark.ui.retainedStages",
        "spark.ui.retainedDeadExecutors",
        "spark.sql.ui.retainedExecutions",
        "spark.sql.streaming.ui.retainedQueries",
    ),
    "20",
)
"""Spark keeps the figures of its last 1,000 jobs, stages and SQL executions for its web page, which is off here. Every
epoch is one of each, so the driver's memory would grow for days."""


_QUICK = "-XX:TieredStopAtLevel=1"
"""Java options without the second compiler, which uses a core for minutes to speed up calculations not done here."""


def session(
    master: str = "local[*]", name: str = "keylane", *, lanes_only: bool = False, **conf: str
) -> SparkSession:
    """Create a session on ``master``; further settings are keyword arguments with ``_`` for ``.``.

    ``lanes_only``: for a session that only runs apps. Epochs then follow each other faster; queries over large data
    would be slower.

    ``local[N]`` becomes ``local[N,4]``: without the second number, Spark ends a query after one failed task.
    The workers use this Python. Raises :class:`SettingsError` if Spark does not start.
    """
    from py4j.protocol import Py4JError  # noqa: PLC0415 - takes half a second; the CLI's --help must not pay it
    from pyspark.errors import PySparkException  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    from keylane.spark.class_archive import java_options  # noqa: PLC0415
    from keylane.spark.failure_report import cause  # noqa: PLC0415
    from keylane.spark.java import describe_java  # noqa: PLC0415
    from keylane.spark.jvm import quieted  # noqa: PLC0415

    java = describe_java()
    local = with_retries(master)
    if local:
        master = local
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ.setdefault("PYSPARK_PYTHON", str(worker_python()))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    quiet = Path(__file__).with_name("log4j2.properties")
    settings = {
        "spark.driver.extraJavaOptions": (
            f"-Dlog4j2.configurationFile=file:{quote(str(quiet))} {java_options(java)} {_QUICK if lanes_only else ''}"
        ),
        "spark.ui.enabled": "false",
        **_FORGET,
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.streaming.stopTimeout": "60s",
        # Also for a failed query: nothing would find it again, and a supervisor may start many.
        "spark.sql.streaming.forceDeleteTempCheckpointLocation": "true",
        **(_PLAIN_FILES if local else {}),
        **{key.replace("_", "."): value for key, value in conf.items()},
    }
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        with quieted():
            return builder.getOrCreate()
    except (PySparkException, Py4JError, ConnectionError) as error:
        raise SettingsError(f"could not start Spark on {master!r}: {cause(error).line}") from error


def with_retries(master: str) -> str | None:
    """Return a local master with task retries, its own or :data:`TASK_ATTEMPTS_MAX`; None for other masters."""
    local = re.fullmatch(r"local(?:\[([^,\]]+)(?:, *(\d+))?\])?", master)
    return None if local is None else f"local[{local[1] or 1},{local[2] or TASK_ATTEMPTS_MAX}]"


def use_this_python(spark: SparkSession) -> None:
    """Let workers on this machine run this Python, which has our packages, unless another one is configured."""
    context = spark.sparkContext
    if "PYSPARK_PYTHON" not in os.environ and (context.master or "").startswith("local"):
        context.pythonExec = sys.executable


def refuse_speculation(spark: SparkSession) -> None:
    """Reject speculation, which runs a task twice at the same time. Raises :class:`SettingsError`."""
    if spark.sparkContext.getConf().get("spark.speculation", "false").lower() == "true":
        raise SettingsError(
            "spark.speculation must be off: Spark would run a lane twice at the same time. Turn it off here"
        )


def worker_python() -> Path:
    """Return this Python for local workers, without Spark's zipped copies of PySpark on its path.

    Spark puts the zips before the installed package, which is the same but already compiled. Every worker and planner
    would compile them for three quarters of a second, half a dozen processes before the first message runs.
    """
    script = f"""#!/bin/sh
# Made by Keylane: use the installed PySpark instead of Spark's zip files.
zips='/python/lib/(pyspark|py4j-.*-src)\\.zip$'
PYTHONPATH=$(printf '%s' "$PYTHONPATH" | tr ':' '\\n' | grep -vE "$zips" | paste -sd: -)
export PYTHONPATH
exec {shlex.quote(sys.executable)} "$@"
"""
    folder = cache_folder()
    path = folder / f"python-{hashlib.sha256(script.encode()).hexdigest()[:12]}"
    if not (os.access(path, os.X_OK) and path.read_text(errors="replace") == script):
        folder.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(script)
        new.chmod(0o755)
        new.replace(path)
    return path
