"""From facts to findings: machines, Spark, the broker. Nothing here asks anybody: every fault can be planted."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from keylane.doctor.finding import Finding, counted, fault, note, ok, warning

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from keylane.doctor.facts import AppFacts, ClusterFacts, HostFacts, JavaFacts, SparkFacts

OLDEST_PYTHON = (3, 11)
SKEW = 5.0
"""Seconds by which clocks may differ."""
_SLOW = 2.0
_OWN = ("keylane", "pyspark")
"""Packages of which driver and workers must have the same."""


def judge_host(host: HostFacts, java: JavaFacts, bounds: Mapping[str, str]) -> Iterator[Finding]:
    """This machine. ``bounds`` are the versions that Keylane asks for, as in ``>=4.2,<5``."""
    if _numbers(host.python)[:2] < OLDEST_PYTHON:
        yield fault(
            "python",
            f"Python {host.python}",
            f"Keylane needs Python {'.'.join(map(str, OLDEST_PYTHON))} or newer: make an environment with one",
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
    """Spark, and what its workers have."""
    if spark.fault:
        yield fault(
            "spark",
            f"{spark.master}: {spark.fault}",
            "correct --master, and see that the master has workers with free cores; 'local[2]' runs on this machine",
        )
        return
    yield ok("spark", f"{spark.master} runs tasks: {spark.slots} at once")
    if spark.speculation:
        yield fault(
            "spark",
            "spark.speculation is on: Spark would run a lane twice at the same time",
            "set spark.speculation=false for this app",
        )
    if spark.max_failures < 4:
        yield warning(
            "spark",
            f"a query ends when one task has failed {_times(spark.max_failures)}",
            "set spark.task.maxFailures=4 (local masters: local[N,4])",
        )
    yield from _workers(spark.workers, driver)


def _workers(workers: Iterable[HostFacts], driver: HostFacts) -> Iterator[Finding]:
    said: set[str] = set()
    sound = True
    for host in workers:
        for finding in _worker(host, driver):
            sound = False
            if finding.found not in said:
                said.add(finding.found)
                yield finding
    names = sorted({host.name for host in workers})
    if sound and names:
        yield ok("workers", f"{', '.join(names)}: the same Python and packages as here")


def _worker(host: HostFacts, driver: HostFacts) -> Iterator[Finding]:
    if _numbers(host.python)[:2] != _numbers(driver.python)[:2]:
        yield fault(
            "workers",
            f"{host.name} has Python {host.python}, the driver {driver.python}: apps cannot be shipped between them",
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
            which = fault if name in _OWN else warning
            yield which(
                "workers",
                f"{host.name} has {name} {have}, the driver {version}",
                f"install {name}=={version} there",
            )
    before, after = host.asked
    if after and not before - SKEW <= host.clock <= after + SKEW:
        away = host.clock - (after if host.clock > after else before)
        yield warning(
            "clocks",
            f"the clock of {host.name} is {abs(away):.0f} s {'ahead of' if away > 0 else 'behind'} this one",
            "let all machines follow a time server (chrony, ntpd)",
        )


def judge_slots(app: AppFacts, spark: SparkFacts, cluster: ClusterFacts) -> Iterator[Finding]:
    """Whether what Spark has can be used."""
    source = cluster.topics.get(app.source or "")
    if spark.fault or source is None:
        return
    most = spark.slots if app.tasks is None else min(app.tasks, spark.slots)
    if app.tasks is not None and app.tasks > spark.slots:
        yield warning(
            "slots",
            f"{app.tasks} tasks are asked for, and Spark has {spark.slots} slots",
            "give Spark more cores, or leave the option 'tasks' out",
        )
    whole = not app.order.splittable and app.order.max_tasks is None
    useful = source.partitions if whole else app.order.max_tasks or most
    if useful < most:
        yield note(
            "slots",
            f"{most} tasks could run at once, but order={app.order!r} uses {useful}",
            "more partitions" if whole else 'order="key", if order inside a key is enough',
        )
    else:
        yield ok("slots", f"{counted(most, 'task')} for {counted(source.partitions, 'partition')}")


def judge_cluster(cluster: ClusterFacts) -> Iterator[Finding]:
    """Whether the broker answers."""
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
    if cluster.seconds > _SLOW:
        yield warning(
            "broker",
            f"its first answer took {cluster.seconds:.1f} s",
            "look at the network, the name service and the broker's load",
        )


def judge_spool(folders: Collection[Path], own: Path) -> Iterator[Finding]:
    """Dead letters that wait on this machine for other clusters, in ``folders``; ``own`` are for this one."""
    if not folders:
        yield ok("spool", "no dead letters wait on this machine for another cluster")
    for folder in folders:
        yield warning(
            "spool",
            f"dead letters of another cluster, or of an unknown one, wait in {folder}",
            f"run the app in their cluster on this machine: it sends them. If they belong to this cluster, move the "
            f"files to {own}",
        )


def fits(version: str, bound: str) -> bool:
    """Whether a version is within bounds like ``>=4.2,<5``; other comparisons count as fitting."""
    have = _numbers(version)
    for part in bound.split(","):
        found = re.fullmatch(r"\s*(>=|<)\s*([\d.]+)\s*", part)
        if found is None:
            continue
        wanted = _numbers(found[2])
        width = max(len(have), len(wanted))
        mine, theirs = (one + (0,) * (width - len(one)) for one in (have, wanted))
        if (found[1] == ">=" and mine < theirs) or (found[1] == "<" and mine >= theirs):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
