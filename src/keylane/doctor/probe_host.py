"""Probe of this machine, and of Spark and its workers."""

from __future__ import annotations

import re
import threading
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any

from keylane.doctor import worker
from keylane.doctor.facts import HostFacts, JavaFacts, SparkFacts
from keylane.errors import KeylaneError
from keylane.spark.java import JavaError, describe_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JOB_TIMEOUT_SECONDS = 60.0
"""How long a small job may take; without free cores it never runs."""


def bounds() -> dict[str, str]:
    """The packages that Keylane needs at run time, with the versions it requires."""
    try:
        required = metadata.requires("keylane") or []
    except metadata.PackageNotFoundError:
        required = []
    found = {}
    for line in required:
        name = re.match(r"([A-Za-z0-9_.-]+)\s*([^;]*)", line)
        if name is not None and "extra ==" not in line:
            found[name[1].lower()] = name[2].strip()
    return found


def probe_host(needed: dict[str, str]) -> tuple[HostFacts, JavaFacts]:
    """Facts about this machine and its Java."""
    name, python, packages, clock = worker.describe(["keylane", *needed])
    try:
        java = describe_java()
        version = re.search(r'version "([^"]+)"', java.banner)
        found = JavaFacts(version=version[1] if version else str(java.major), path=str(java.path))
    except JavaError as error:
        found = JavaFacts(fault=str(error))
    return HostFacts(name=name, python=python, packages=packages, clock=clock), found


def probe_spark(master: str, packages: list[str], timeout: float = JOB_TIMEOUT_SECONDS) -> SparkFacts:
    """Facts about Spark: starts it, runs a job on every slot, and stops it.

    A Spark that does not start, or runs no job within ``timeout`` seconds, is in ``fault``.
    """
    from keylane.spark.spark_session import session  # noqa: PLC0415 - takes half a second to import

    try:
        spark = session(master, "keylane doctor")
    except KeylaneError as error:
        return SparkFacts(master=master, fault=str(error))
    try:
        return _describe(spark, master, packages, timeout)
    finally:
        spark.stop()


def _describe(spark: SparkSession, master: str, packages: list[str], timeout: float) -> SparkFacts:
    from pyspark import cloudpickle  # noqa: PLC0415

    from keylane.spark.scaling_monitor import tasks_for  # noqa: PLC0415

    context = spark.sparkContext
    answers: list[tuple[Any, ...]] = []
    failures: list[Exception] = []
    job = threading.Thread(target=_run, args=(context, packages, answers, failures), daemon=True)
    cloudpickle.register_pickle_by_value(worker)  # type: ignore[no-untyped-call]
    try:
        before = time.time()
        job.start()
        job.join(timeout)
        after = time.time()
    finally:
        cloudpickle.unregister_pickle_by_value(worker)  # type: ignore[no-untyped-call]
    if job.is_alive():
        context.cancelAllJobs()
        return SparkFacts(
            master=master,
            fault=f"no task ran within {timeout:.0f} s: there are no executors with free cores",
        )
    if failures:
        from keylane.spark.failure_report import cause  # noqa: PLC0415

        return SparkFacts(master=master, fault=f"a small job failed: {cause(failures[0]).line}")
    conf = context.getConf()
    local = re.fullmatch(r"local\[[^,\]]+,(\d+)\]", context.master or "")
    return SparkFacts(
        master=master,
        slots=tasks_for(spark, None),
        workers=tuple(
            HostFacts(name=name, python=python, packages=found, clock=clock, asked=(before, after))
            for name, python, found, clock in answers
        ),
        speculation=(conf.get("spark.speculation", "false") or "").lower() == "true",
        max_failures=int(local[1] if local else conf.get("spark.task.maxFailures", "4") or 4),
    )


def _run(context: Any, packages: list[str], answers: list[Any], failures: list[Exception]) -> None:
    try:
        count = 2 * max(1, context.defaultParallelism)
        answers.extend(
            context.parallelize(range(count), count).mapPartitions(worker.describe_each(packages)).collect()
        )
    except Exception as error:
        failures.append(error)
