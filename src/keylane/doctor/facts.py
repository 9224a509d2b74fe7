"""Facts that the doctor judges, as plain values, so that tests can plant any fault."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from keylane.lanes.ordering import KEY
from keylane.rights import app_rights
from keylane.topic_names import AppTopicNames

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from keylane.lanes.ordering import Ordering
    from keylane.rights import Right


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """A machine with Python on it: the driver's, or a worker's."""

    name: str
    python: str
    """Version."""
    packages: Mapping[str, str]
    """Version by name; a package that is missing is not in it."""
    clock: float = 0.0
    """Unix time on that machine when it answered."""
    asked: tuple[float, float] = (0.0, 0.0)
    """Unix times on the driver before and after the question; ``clock`` should be between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JavaFacts:
    """The Java that Spark and the embedded broker run on. ``fault`` is a sentence: why none was found."""

    version: str = ""
    path: str = ""
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkFacts:
    """A Spark session and what ran on it. ``fault`` is a sentence: why it did not start or run tasks."""

    master: str
    slots: int = 0
    workers: tuple[HostFacts, ...] = ()
    speculation: bool = False
    max_failures: int = 4
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppFacts(AppTopicNames):
    """The settings of the app that the doctor checks. ``source`` is None when only a name was given."""

    name: str
    source: str | None
    sinks: tuple[str, ...] = ()
    order: Ordering = KEY
    ledger: bool = False
    states: bool = False
    """Whether its stages keep lane state."""
    tasks: int | None = None
    """The most tasks that its options allow; None: no limit."""
    spool: Path | None = None
    """The folder for dead letters that their topic refuses; None: the default folder."""

    @property
    def rights(self) -> tuple[Right, ...]:
        """What it needs; empty when the source is not known."""
        if self.source is None:
            return ()
        return app_rights(self.name, self.source, self.sinks, ledger=self.ledger, states=self.states)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicFacts:
    """One topic."""

    partitions: int
    replicas: int
    """The smallest number of replicas of any partition."""
    behind: int = 0
    """Partitions with replicas that are not in sync."""
    leaderless: int = 0
    settings: Mapping[str, str] | None = None
    """None: reading them is not allowed."""

    def number(self, name: str) -> int | None:
        """A numeric setting; None when it is unknown."""
        try:
            return int((self.settings or {})[name])
        except (KeyError, ValueError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """The app's progress in one partition of its source."""

    partition: int
    beginning: int
    end: int
    committed: int | None
    waiting_since: float | None = None
    """Timestamp (Unix time) of the oldest message that is not done; None when all are done."""
    newest: float | None = None
    """Timestamp (Unix time) of the last message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """The app's consumer group. ``unread`` is the reason why it could not be described."""

    state: str = ""
    members: tuple[str, ...] = ()
    unread: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """A Kafka cluster and the app's topics on it. ``fault`` is a sentence: why it cannot be reached."""

    bootstrap: str
    brokers: int = 0
    seconds: float = 0.0
    """How long its first answer took."""
    topics: Mapping[str, TopicFacts] = field(default_factory=dict)
    secured: bool | None = None
    """Whether it has an authorizer; None: unknown, because reading the rules is not allowed."""
    allowed: Mapping[Right, bool] = field(default_factory=dict)
    """Rights that the app needs now, and whether this user has them; those that are unknown are missing."""
    group: GroupFacts | None = None
    positions: tuple[GroupPosition, ...] = ()
    owners: tuple[str, ...] = ()
    """Tasks of the app that own partitions; some may have been killed."""
    malformed: Mapping[str, int] = field(default_factory=dict)
    """Records of the state topic that could not be read, by kind."""
    id: str = ""
    """Empty when it is unknown."""
    offsets_kept: float | None = None
    """Seconds from the last commit of an offset until the cluster deletes it; None: reading it is not allowed."""
    fault: str = ""
    now: float = 0.0
    """Unix time on the driver when the probe began."""
