"""What the doctor knows, before anybody judges it. Values only: tests plant them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from keylane.lanes.ordering import KEY
from keylane.topic_names import dead_letter_topic, ledger_topic, state_topic

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from keylane.lanes.ordering import Ordering


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """A machine with Python on it: the driver's, or a worker's."""

    name: str
    python: str
    """Version."""
    packages: Mapping[str, str]
    """Version by name; a package that is missing is not in it."""
    clock: float = 0.0
    """Unix time there when it was asked."""
    asked: tuple[float, float] = (0.0, 0.0)
    """Unix times here before and after asking: the clock there should be between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JavaFacts:
    """The Java that Spark and the embedded broker run on. ``fault`` says in a sentence why there is none."""

    version: str = ""
    path: str = ""
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkFacts:
    """A Spark that was started, and what ran on it. ``fault`` says in a sentence why it was not."""

    master: str
    slots: int = 0
    workers: tuple[HostFacts, ...] = ()
    speculation: bool = False
    max_failures: int = 4
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppFacts:
    """The app, as far as it matters here. ``source`` is None when only a name was given."""

    name: str
    source: str | None
    sink: str | None = None
    order: Ordering = KEY
    ledger: bool = False
    tasks: int | None = None
    """At most so many, by its options."""
    spool: Path | None = None
    """Where its dead letters wait while their topic takes none; None: the usual folder."""

    @property
    def dlq(self) -> str:
        """Topic."""
        return dead_letter_topic(self.name)

    @property
    def state(self) -> str:
        """Topic."""
        return state_topic(self.name)

    @property
    def ledger_topic(self) -> str:
        """Topic."""
        return ledger_topic(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicFacts:
    """One topic."""

    partitions: int
    replicas: int
    """Of the partition that has fewest."""
    behind: int = 0
    """Partitions that have fewer replicas in sync than they should."""
    leaderless: int = 0
    settings: Mapping[str, str] | None = None
    """None: not allowed to read them."""
    rights: frozenset[str] | None = None
    """READ, WRITE …; None: the broker does not say."""

    def number(self, name: str) -> int | None:
        """A setting that is a number; None when it is not known."""
        try:
            return int((self.settings or {})[name])
        except (KeyError, ValueError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """How far the app is in one partition of its source."""

    partition: int
    beginning: int
    end: int
    committed: int | None
    waiting_since: float | None = None
    """Unix time of the oldest message that is not done, by its own timestamp; None when there is none."""
    newest: float | None = None
    """Unix time of the last message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """The app's consumer group. ``unread`` says why it could not be described."""

    state: str = ""
    members: tuple[str, ...] = ()
    rights: frozenset[str] | None = None
    unread: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """A Kafka cluster, with the topics that matter. ``fault`` says in a sentence why it cannot be reached."""

    bootstrap: str
    brokers: int = 0
    seconds: float = 0.0
    """Until it answered."""
    topics: Mapping[str, TopicFacts] = field(default_factory=dict)
    rights: frozenset[str] | None = None
    """On the cluster itself."""
    secured: bool | None = None
    """Whether there is an authorizer; None: not allowed to know."""
    transactional: bool | None = None
    """Whether some rule allows WRITE on transactional ids that begin with the app's name; None: not known."""
    group: GroupFacts | None = None
    positions: tuple[GroupPosition, ...] = ()
    owners: tuple[str, ...] = ()
    """Tasks of the app that own partitions now, or were killed."""
    malformed: Mapping[str, int] = field(default_factory=dict)
    """Records of the state topic that could not be read, by kind."""
    id: str = ""
    """Empty when it is not known."""
    offsets_kept: float | None = None
    """Seconds from the last commit of an offset until the cluster deletes it; None: not allowed to know."""
    fault: str = ""
    now: float = 0.0
    """Unix time here when all this was asked."""
