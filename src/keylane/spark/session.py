"""A Spark session that suits Keylane."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from keylane.errors import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RETRIES = 4


def session(master: str = "local[*]", name: str = "keylane", **conf: str) -> SparkSession:
    """A session on ``master``; further settings as keyword arguments with ``_`` for ``.``.

    ``local[N]`` becomes ``local[N,4]``: without the second number Spark gives up on a query when one task fails once.
    The workers use this Python. Raises :class:`SettingsError` when Spark cannot be started.
    """
    from pyspark.errors import PySparkRuntimeError  # noqa: PLC0415 - takes half a second; the CLI's --help must not pay it
    from pyspark.sql import SparkSession  # noqa: PLC0415

    from keylane.broker.java import find_java  # noqa: PLC0415

    find_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    local = re.fullmatch(r"local(?:\[([^,\]]+)\])?", master)
    if local:
        master = f"local[{local[1] or 1},{RETRIES}]"
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    quiet = Path(__file__).with_name("log4j2.properties")
    settings = {
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile=file:{quote(str(quiet))}",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.streaming.stopTimeout": "60s",
        **{key.replace("_", "."): value for key, value in conf.items()},
    }
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except PySparkRuntimeError as error:
        raise SettingsError(f"Spark could not be started on {master!r}: {error}") from error
