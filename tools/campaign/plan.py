"""What a seed decides: which faults, when, how long, and the load they hit.

The last two digits of a seed name its fault: 00 is no fault, 01 kills a worker, … (see :class:`Kind`), so that seeds
1, 101, 201 are three times the same fault at other moments. Any other ending, such as 99, is two faults at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

SEED_STEP = 100
PAIR_NUMBER = 99


class Kind(Enum):
    """The faults: the ending of their seeds, their name, and what happens."""

    NONE = (0, "none", "nothing: what the judge sees without a fault")
    WORKER = (1, "worker", "kill -9 of a Python worker in the middle of its task")
    EXECUTOR = (2, "executor", "kill -9 of an executor's Java, on a local cluster of two")
    DRIVER = (3, "driver", "kill -9 of the driver, Python and Java; it is started again")
    BROKER = (4, "broker", "kill -9 of the broker, which comes back after a while")
    LEADER = (5, "leader", "of three nodes the one that leads a partition is killed, and comes back")
    ZOMBIE = (6, "zombie", "SIGSTOP of a worker, its task taken away and run elsewhere, SIGCONT: it goes on")
    ORPHAN = (7, "orphan", "SIGSTOP of a worker, its driver killed and started again, SIGCONT: it goes on")
    SLOW = (8, "slow", "the broker's answers and the requests to it take up to a second")
    COMMITS = (9, "commits", "connections are cut at a commit, before or after the broker has it")
    CHECKPOINT = (10, "checkpoint", "Spark's checkpoint is deleted between two runs")
    OFFSETS = (11, "offsets", "the group's offsets are deleted between two runs")
    RESTART = (12, "restart", "the app is stopped in order, and started again")
    PLANNER = (13, "planner", "kill -9 of the planner's process: the query dies and is started again")
    LATE = (14, "late", "the end of a transaction is cut off, and comes to the broker during the next one")
    WORKER_EDGE = (21, "worker-edge", "kill -9 of a worker right where one epoch ends and the next begins")
    DRIVER_EDGE = (23, "driver-edge", "the same for the driver")
    BROKER_EDGE = (24, "broker-edge", "the same for the broker")
    ZOMBIE_EDGE = (26, "zombie-edge", "the same for a worker that is stopped and goes on later")
    DETACHED = (31, "detached", "kill -9 of a worker between two epochs, while its lanes run without a task")
    ABANDONED = (
        33,
        "abandoned",
        "kill -9 of the driver and of the workers' daemon: nobody ends the workers' lanes",
    )
    ATTACH = (
        36,
        "attach",
        "SIGSTOP of a worker between two epochs; its part moves in the next; SIGCONT: it goes on",
    )
    ELSEWHERE = (
        37,
        "elsewhere",
        "a task begins again in another worker while calls still run in the old one",
    )
    COMMITS_EDGE = (29, "commits-edge", "the same for connections that are cut at a commit")

    def __init__(self, ending: int, label: str, about: str) -> None:
        self.ending = ending
        self.label = label
        self.about = about

    @property
    def at_edge(self) -> bool:
        """Whether it strikes where an epoch ends."""
        return self.label.endswith("-edge")

    @property
    def between_epochs(self) -> bool:
        """Whether it waits until no task is attached to a worker's lanes."""
        return self in (Kind.DETACHED, Kind.ATTACH)

    @property
    def plain(self) -> Kind:
        """The same fault, at any moment."""
        return Kind.named(self.label.removesuffix("-edge"))

    @classmethod
    def named(cls, label: str) -> Kind:
        """Raises KeyError when there is no such fault."""
        return {kind.label: kind for kind in cls}[label]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """One fault, as the seed wants it."""

    kind: Kind
    at: float
    """Seconds after the load began; at an edge: seconds after the first epoch that began since then should end."""
    pick: float
    """Between 0 and 1: which of the processes, nodes or partitions that it may hit."""
    lasting: float
    """Seconds until the broker is back, the network is well, or the zombie continues."""

    def __str__(self) -> str:
        when = f"{self.at:+.2f} s around an epoch's end" if self.kind.at_edge else f"at {self.at:.2f} s"
        return f"{self.kind.label} {when}, for {self.lasting:.2f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run, before it begins."""

    seed: int
    shots: tuple[Shot, ...]
    epoch: float
    messages: int
    rate: float
    keys: int
    patient: bool = False
    slow: bool = False
    """Whether a few calls take seconds."""

    @classmethod
    def of(cls, seed: int, *, patient: bool = False) -> Plan:
        """The same every time. ``patient``: brokers may stay away for up to 20 s."""
        rng = random.Random(f"plan {seed}")
        single = next((kind for kind in Kind if kind.ending == seed % SEED_STEP), None)
        kinds = [single] if single else rng.sample([kind for kind in Kind if kind is not Kind.NONE], 2)
        edge = any(kind.at_edge or kind.between_epochs for kind in kinds)
        slow = not {Kind.DETACHED, Kind.ABANDONED, Kind.ATTACH, Kind.ELSEWHERE}.isdisjoint(kinds)
        rate = rng.choice([300.0, 400.0, 500.0])
        seconds = rng.uniform(4.5, 6.0)
        if any(kind.plain in (Kind.ZOMBIE, Kind.ORPHAN) for kind in kinds):
            seconds += 2.5
        if slow:
            seconds += 4.0  # until an epoch has ended, and the next is there
        return cls(
            seed=seed,
            shots=tuple(_shot(kind, rng, patient=patient) for kind in kinds if kind is not Kind.NONE),
            epoch=rng.choice([2.0, 2.5, 3.0]) if edge or rng.random() < 0.3 else 300.0,
            messages=int(rate * seconds),
            rate=rate,
            keys=rng.choice([30, 60, 90]),
            patient=patient,
            slow=slow,
        )

    @property
    def kinds(self) -> frozenset[Kind]:
        """The faults in it, wherever they strike."""
        return frozenset(shot.kind.plain for shot in self.shots)

    @property
    def label(self) -> str:
        """As in ``worker + broker-edge``."""
        return " + ".join(shot.kind.label for shot in self.shots) or Kind.NONE.label

    @property
    def cluster(self) -> bool:
        """Whether it needs executors that are processes of their own."""
        return Kind.EXECUTOR in self.kinds

    @property
    def nodes(self) -> int:
        """How many the broker has."""
        return 3 if Kind.LEADER in self.kinds else 1

    @property
    def proxied(self) -> bool:
        """Whether the app reaches the broker through the proxy."""
        return not self.kinds.isdisjoint((Kind.SLOW, Kind.COMMITS, Kind.LATE))


def _shot(kind: Kind, rng: random.Random, *, patient: bool) -> Shot:
    if kind.plain in (Kind.BROKER, Kind.LEADER):
        longest = 20.0 if patient else 8.0
        lasting = rng.uniform(0.0, 2.0) if rng.random() < 0.8 else rng.uniform(2.0, longest)
    elif kind.plain in (Kind.ZOMBIE, Kind.ORPHAN, Kind.ATTACH):
        lasting = rng.uniform(0.3, 3.5)  # after its replacement has begun: before or after its first commit
    else:
        lasting = rng.uniform(1.5, 3.0)
    latest = 2.0 if kind in (Kind.ZOMBIE, Kind.ORPHAN) else 4.0  # there must be load left when it continues
    at = rng.uniform(-0.3, 0.6) if kind.at_edge else rng.uniform(0.8, latest)
    return Shot(kind=kind, at=at, pick=rng.random(), lasting=lasting)
