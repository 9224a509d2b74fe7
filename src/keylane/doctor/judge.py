"""Findings about machines, Spark and the broker. Pure functions of facts: no network, no files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from keylane.doctor.finding import Finding, counted, fault, note, ok, warning

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from keylane.doctor.facts import AppFacts, ClusterFacts, HostFacts, JavaFacts, SparkFacts

OLDEST_PYTHON = (3, 11)
MAX_CLOCK_SKEW_SECONDS = 5.0
_SLOW_ANSWER_SECONDS = 2.0
_SAME_EVERYWHERE = ("keylane", "pyspark")
"""Packages whose versions must be equal on the driver and the workers."""


def judge_host(host: HostFacts, java: JavaFacts, bounds: Mapping[str, str]) -> Iterator[Finding]:
    """Check this machine. ``bounds`` are the versions that Keylane requires, such as ``>=4.2,<5``."""
    if _numbers(host.python)[:2] < OLDEST_PYTHON:
        yield fault(
            "python",
            f"Python {host.python}",
            f"create an environment with Python {'.'.join(map(str, OLDEST_PYTHON))} or newer",
        )
    else:
        yield ok("python", f"Python {host.python}")
    if java.fault:
        yield fault(
            "java", java.fault, "install Java 17 or newer and put it on PATH, or point JAVA_HOME at it"
        )
    else:
        yield ok("java", f"Java {java.version} at {java.path}")
    wrong = False
    for name, bound in bounds.items():
        have = host.packages.get(name)
        if have is None or not fits(have, bound):
            wrong = True
            found = "is not installed" if have is None else f"is {have}"
            yield fault(
                "packages", f"{name} {found}; {name}{bound} is needed", f"pip install '{name}{bound}'"
            )
    if not wrong:
        shown = ", ".join(f"{name} {version}" for name, version in sorted(host.packages.items()))
        yield ok("packages", shown or "none to compare")


def judge_spark(spark: SparkFacts, driver: HostFacts) -> Iterator[Finding]:
    """Check Spark and the packages of its workers."""
    if spark.fault:
        yield fault(
            "spark",
            f"{spark.master}: {spark.fault}",
            "correct --master, and check that the master has workers with free cores; 'local[2]' runs on this machine",
        )
        return
    yield ok("spark", f"{spark.master} runs {spark.slots} tasks at once")
    if spark.speculation:
        yield fault(
            "spark",
            "spark.speculation is on: Spark may run a lane twice at the same time",
            "set spark.speculation=false for this app",
        )
    if spark.max_failures < 4:
        yield warning(
            "spark",
            f"a query ends after one task has failed {_times(spark.max_failures)}",
            "set spark.task.maxFailures=4 (local masters: local[N,4])",
        )
    yield from _workers(spark.workers, driver)


def _workers(workers: Iterable[HostFacts], driver: HostFacts) -> Iterator[Finding]:
    reported: set[str] = set()
    sound = True
    for host in workers:
        for finding in _worker(host, driver):
            sound = False
            if finding.found not in reported:
                reported.add(finding.found)
                yield finding
    names = sorted({host.name for host in workers})
    if sound and names:
        yield ok("workers", f"{', '.join(names)}: same Python and packages as the driver")


def _worker(host: HostFacts, driver: HostFacts) -> Iterator[Finding]:
    if _numbers(host.python)[:2] != _numbers(driver.python)[:2]:
        yield fault(
            "workers",
            f"{host.name} has Python {host.python}, the driver {driver.python}: the app cannot be sent to it",
            "point PYSPARK_PYTHON at the same Python on all machines",
        )
    for name, version in driver.packages.items():
        have = host.packages.get(name)
        if have is None:
            yield fault(
                "workers",
                f"{host.name} has no {name}",
                f"install {name}=={version} there, or ship an environment: --archives env.tar.gz#env with "
                "PYSPARK_PYTHON=./env/bin/python",
            )
        elif have != version:
            level = fault if name in _SAME_EVERYWHERE else warning
            yield level(
                "workers",
                f"{host.name} has {name} {have}, the driver {version}",
                f"install {name}=={version} there",
            )
    before, after = host.asked
    if after and not before - MAX_CLOCK_SKEW_SECONDS <= host.clock <= after + MAX_CLOCK_SKEW_SECONDS:
        ahead = host.clock - (after if host.clock > after else before)
        yield warning(
            "clocks",
            f"the clock of {host.name} is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this one",
            "synchronize all machines with a time server (chrony, ntpd)",
        )


def judge_slots(app: AppFacts, spark: SparkFacts, cluster: ClusterFacts) -> Iterator[Finding]:
    """Check whether the app can use all of Spark's slots."""
    source = cluster.topics.get(app.source or "")
    if spark.fault or source is None:
        return
    most = spark.slots if app.tasks is None else min(app.tasks, spark.slots)
    if app.tasks is not None and app.tasks > spark.slots:
        yield warning(
            "slots",
            f"the app asks for {app.tasks} tasks, and Spark has {spark.slots} slots",
            "give Spark more cores, or leave out --tasks",
        )
    whole = not app.order.splittable and app.order.max_tasks is None
    useful = source.partitions if whole else app.order.max_tasks or most
    if useful < most:
        yield note(
            "slots",
            f"{most} tasks could run at once, but order={app.order!r} uses {useful}",
            "add partitions" if whole else 'use order="key" if order inside a key is enough',
        )
    else:
        yield ok("slots", f"{counted(most, 'task')} for {counted(source.partitions, 'partition')}")


def judge_cluster(cluster: ClusterFacts) -> Iterator[Finding]:
    """Check that the broker answers."""
    if cluster.fault:
        yield fault(
            "broker",
            cluster.fault,
            "correct --bootstrap and the kafka.* options; 'keylane broker start' starts a broker on this machine",
        )
        return
    yield ok(
        "broker",
        f"{cluster.bootstrap}: {counted(cluster.brokers, 'broker')}, answered in {cluster.seconds:.2f} s",
    )
    if cluster.seconds > _SLOW_ANSWER_SECONDS:
        yield warning(
            "broker",
            f"the first answer took {cluster.seconds:.1f} s",
            "check the network, the name service and the broker's load",
        )


def judge_spool(folders: Collection[Path], own: Path) -> Iterator[Finding]:
    """Check for spooled dead letters of other clusters, in ``folders``; ``own`` is the folder for this cluster."""
    if not folders:
        yield ok("spool", "this machine has no spooled dead letters of another cluster")
    for folder in folders:
        yield warning(
            "spool",
            f"dead letters of another or an unknown cluster are spooled in {folder}",
            f"run the app against their cluster on this machine: it sends them. If they belong to this cluster, move "
            f"the files to {own}",
        )


def fits(version: str, bound: str) -> bool:
    """Whether a version is within bounds such as ``>=4.2,<5``; other comparisons are ignored."""
    have = _numbers(version)
    for part in bound.split(","):
        found = re.fullmatch(r"\s*(>=|<)\s*([\d.]+)\s*", part)
        if found is None:
            continue
        limit = _numbers(found[2])
        width = max(len(have), len(limit))
        padded, padded_limit = (one + (0,) * (width - len(one)) for one in (have, limit))
        if (found[1] == ">=" and padded < padded_limit) or (found[1] == "<" and padded >= padded_limit):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
