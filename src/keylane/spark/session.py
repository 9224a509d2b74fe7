"""A Spark session that suits Keylane."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from platformdirs import user_cache_dir

from keylane.errors import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RETRIES = 4

_PLAIN_FILES = {
    # Spark writes two small files where one epoch ends and the next begins, while every lane waits. With checksums and
    # permissions Hadoop runs a `chmod` for each of them, twice: a tenth of a second a file.
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}


_QUICK = "-XX:TieredStopAtLevel=1"
"""For Java: no second compiler. It takes a core for minutes to make calculations faster, and there are none to make."""


def session(
    master: str = "local[*]", name: str = "keylane", *, lanes_only: bool = False, **conf: str
) -> SparkSession:
    """A session on ``master``; further settings as keyword arguments with ``_`` for ``.``.

    ``lanes_only``: it runs apps and calculates nothing by itself. Epochs then follow each other sooner; queries over
    much data would take longer.

    ``local[N]`` becomes ``local[N,4]``: without the second number Spark gives up on a query when one task fails once.
    The workers use this Python. Raises :class:`SettingsError` when Spark cannot be started.
    """
    from py4j.protocol import Py4JError  # noqa: PLC0415 - takes half a second; the CLI's --help must not pay it
    from pyspark.errors import PySparkException  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    from keylane.broker.java import describe_java  # noqa: PLC0415
    from keylane.spark.archive import java_options  # noqa: PLC0415
    from keylane.spark.failure import cause  # noqa: PLC0415

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
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.streaming.stopTimeout": "60s",
        # Of a query that failed too: nobody could find it again, and a supervisor may start many.
        "spark.sql.streaming.forceDeleteTempCheckpointLocation": "true",
        **(_PLAIN_FILES if local else {}),
        **{key.replace("_", "."): value for key, value in conf.items()},
    }
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except (PySparkException, Py4JError, ConnectionError) as error:
        raise SettingsError(f"Spark could not be started on {master!r}: {cause(error).line}") from error


def with_retries(master: str) -> str | None:
    """A local master that runs a failed task again, as often as it says itself or :data:`RETRIES`; None for others."""
    local = re.fullmatch(r"local(?:\[([^,\]]+)(?:, *(\d+))?\])?", master)
    return None if local is None else f"local[{local[1] or 1},{local[2] or RETRIES}]"


def use_this_python(spark: SparkSession) -> None:
    """Let workers on this machine run this Python, which has our packages, unless somebody has chosen another."""
    context = spark.sparkContext
    if "PYSPARK_PYTHON" not in os.environ and (context.master or "").startswith("local"):
        context.pythonExec = sys.executable


def refuse_speculation(spark: SparkSession) -> None:
    """Raises :class:`SettingsError` when Spark would run a task twice at the same time."""
    if spark.sparkContext.getConf().get("spark.speculation", "false").lower() == "true":
        raise SettingsError(
            "spark.speculation is on: Spark would run a lane twice at the same time. Turn it off for this session"
        )


def worker_python() -> Path:
    """This Python for workers on this machine, without Spark's zipped copies of PySpark on its path.

    Spark puts them before the installed package, which is the same but for its compiled bytecode: every worker and
    planner would compile a zip for three quarters of a second, half a dozen of them before the first message runs.
    """
    script = f"""#!/bin/sh
# Made by Keylane: PySpark as it is installed, not as Spark's zip files hold it.
zips='/python/lib/(pyspark|py4j-.*-src)\\.zip$'
PYTHONPATH=$(printf '%s' "$PYTHONPATH" | tr ':' '\\n' | grep -vE "$zips" | paste -sd: -)
export PYTHONPATH
exec {shlex.quote(sys.executable)} "$@"
"""
    folder = Path(os.environ.get("KEYLANE_CACHE") or user_cache_dir("keylane"))
    path = folder / f"python-{hashlib.sha256(script.encode()).hexdigest()[:12]}"
    if not os.access(path, os.X_OK):
        folder.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(script)
        new.chmod(0o755)
        new.replace(path)
    return path
