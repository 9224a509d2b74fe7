"""Questions to the cluster, and the topics an app owns."""

from __future__ import annotations

import functools
import logging
import os
import time
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from confluent_kafka import OFFSET_INVALID, IsolationLevel, KafkaException, TopicCollection, TopicPartition
from confluent_kafka import KafkaError as ClientError
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # re-exported there without saying so
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from keylane.errors import BrokerError
from keylane.kafka.rejection import NO_RULES, TopicRules
from keylane.kafka.settings import outage
from keylane.offsets.identity import AppIdentity, TopicIdentity
from keylane.offsets.metadata import judge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from confluent_kafka import Consumer

    from keylane.kafka.settings import KafkaSettings
    from keylane.offsets.metadata import Committed
    from keylane.spec import AppSpec

log = logging.getLogger("keylane.kafka")

REQUEST_SECONDS = 10.0
"""Seconds to wait for an answer from the cluster before saying that there is none."""
_SETTLES = 1.0
_ANSWER = 3.0
_NEW_LEADER = 25.0
"""Seconds for a partition to get a new leader; brokers give up on one that died after 9."""

PATIENCE = 60.0
"""Seconds that a :func:`patient` call goes on asking."""
_SAY_EVERY = 10.0

STATE_SEGMENT = 32 << 20
STATE = {
    "cleanup.policy": "compact",
    "segment.bytes": str(STATE_SEGMENT),
    # Kafka's own default, which brokers may lower: a record of large progress must fit.
    "max.message.bytes": "1048588",
}
"""Settings of the state topic."""
STATE_ROOM = 65_536
"""Bytes a lane's record may be larger than the key of its message: the failure's context."""
TELEMETRY = {"retention.ms": "86400000", "segment.ms": "3600000", "segment.bytes": str(16 << 20)}
"""A day of it, in segments of an hour at most: a segment goes as a whole."""
DEAD_LETTER_ROOM = 65_536
"""Bytes a dead letter may be larger than its message: the failure's context."""


_MOVING = (
    ClientError.NOT_LEADER_FOR_PARTITION,
    ClientError.LEADER_NOT_AVAILABLE,
    ClientError.UNKNOWN_TOPIC_OR_PART,  # of a topic that was listed: it is so new that not every broker knows it
    ClientError.NOT_COORDINATOR,
    ClientError.COORDINATOR_NOT_AVAILABLE,
    ClientError.COORDINATOR_LOAD_IN_PROGRESS,
)

P = ParamSpec("P")
T = TypeVar("T")


def patiently(call: Callable[[], T], seconds: float = REQUEST_SECONDS) -> T:
    """Call again while a leader or coordinator is being made or moved, for so many seconds at most."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except KafkaException as error:
            if error.args[0].code() not in _MOVING or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def introduce(consumer: Consumer, topic: str) -> None:
    """Let a new consumer find the topic now: by itself it would take up to a second after its assignment."""
    try:
        consumer.list_topics(topic, timeout=REQUEST_SECONDS)
    except KafkaException as error:
        raise BrokerError(f"topic {topic!r} cannot be read: {error.args[0].str()}") from error


def patient(call: Callable[P, T]) -> Callable[P, T]:
    """Make a call of the planner's wait for a cluster that is away: for :data:`PATIENCE` seconds, then it fails.

    A planner that fails ends the query, and all its tasks with it. One whose Spark has gone does not wait for anybody.
    """

    @functools.wraps(call)
    def waiting(*args: P.args, **named: P.kwargs) -> T:
        began, parent = time.monotonic(), os.getppid()
        said = began - _SAY_EVERY
        while True:
            try:
                return call(*args, **named)
            except BrokerError as error:
                now = time.monotonic()
                if now - began >= PATIENCE or os.getppid() != parent:
                    raise BrokerError(f"{error}; waited for {now - began:.0f} s") from error
                if now - said >= _SAY_EVERY:
                    said = now
                    log.warning("%s; asked again, for up to %g s", error, PATIENCE)
                time.sleep(0.5)

    return waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics:
    """What an app needs to know of its topics."""

    partitions: int
    """Of the source."""
    sink_limit: int
    """The sink's ``max.message.bytes``; 0 without a sink."""
    sink_stamps: bool
    """Whether the sink gives records a time of its own."""


def _topic_id(described: Future[Any]) -> str:
    try:
        return str(described.result().topic_id)
    except KafkaException as error:
        if error.args[0].code() == ClientError.UNKNOWN_TOPIC_OR_PART:
            return ""
        raise


def _rules(described: Future[Any]) -> TopicRules:
    try:
        found = described.result()
    except KafkaException:
        return NO_RULES
    # The sink overwrites the timestamp then, and does not check it.
    overwrites = found["message.timestamp.type"].value == "LogAppendTime"
    max_age_ms, max_ahead_ms = (
        float(found[name].value) if name in found and not overwrites else inf
        for name in ("message.timestamp.before.max.ms", "message.timestamp.after.max.ms")
    )
    return TopicRules(
        limit=int(found["max.message.bytes"].value), max_age_ms=max_age_ms, max_ahead_ms=max_ahead_ms
    )


class Cluster:
    """The cluster behind a bootstrap address. Every method raises :class:`BrokerError` when it gets no answer."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._admin = settings.admin()  # held: its answers never come once it is collected
        self._readers: dict[tuple[str, str], Consumer] = {}
        self._told: set[tuple[TopicIdentity, int]] = set()

    def topics(self) -> dict[str, int]:
        """The topics and their numbers of partitions."""
        try:
            found = self._admin.list_topics(timeout=REQUEST_SECONDS)
        except KafkaException as error:
            self._admin.poll(0)  # what went wrong with its connections
            raise BrokerError(
                f"no Kafka broker answered at {self._settings.bootstrap} within {REQUEST_SECONDS:g} s "
                f"({error.args[0].str()}): {self._settings.explain_no_answer()}"
            ) from error
        outage.answered()
        return {name: len(topic.partitions) for name, topic in found.topics.items() if topic.error is None}

    def partitions(self, topic: str, what: str = "topic", *, among: Mapping[str, int] | None = None) -> int:
        """How many partitions the topic has. Raises BrokerError when it does not exist.

        ``among``: what :meth:`topics` said a moment ago.
        """
        topics = self.topics() if among is None else among
        if topic not in topics:
            if not self._may_see(topic):
                raise BrokerError(
                    f"{what} {topic!r}: this user may not see it at {self._settings.bootstrap}. "
                    "Allow DESCRIBE on it"
                )
            near = [name for name in sorted(topics) if not name.startswith("__")]
            known = (
                f"; there are: {', '.join(near[:10])}{' …' if len(near) > 10 else ''}"
                if near
                else "; there are no topics"
            )
            raise BrokerError(
                f"{what} {topic!r} does not exist at {self._settings.bootstrap}{known}. "
                "Create it, or correct its name"
            )
        return topics[topic]

    def _may_see(self, topic: str) -> bool:
        try:
            self._admin.describe_topics(TopicCollection([topic]), request_timeout=REQUEST_SECONDS)[
                topic
            ].result()
        except KafkaException as error:
            return bool(error.args[0].code() != ClientError.TOPIC_AUTHORIZATION_FAILED)
        return True

    def identity(self, source: str, dlq: str = "") -> AppIdentity:
        """Which topics these are: a topic that was deleted and created again is another one.

        A topic that does not exist has an empty id.
        """
        topics = [topic for topic in (source, dlq) if topic]
        try:
            asked = self._admin.describe_cluster(request_timeout=REQUEST_SECONDS)
            described = self._admin.describe_topics(TopicCollection(topics), request_timeout=REQUEST_SECONDS)
            cluster = str(asked.result().cluster_id)
            ids = {topic: _topic_id(described[topic]) for topic in topics}
        except KafkaException as error:
            names = " and ".join(map(repr, topics))
            raise BrokerError(f"the topic ids of {names} could not be read: {error.args[0].str()}") from error
        one, other = (
            TopicIdentity(cluster=cluster, topic=topic, id=ids.get(topic, "")) for topic in (source, dlq)
        )
        return AppIdentity(source=one, dlq=other)

    def prepare(self, app: AppSpec) -> Topics:
        """Check the app's source and sink and create the topics it owns."""
        count = self.partitions(app.source, f"the source of app {app.name!r}, topic")
        sink_limit, stamps = 0, False
        if app.sink is not None:
            self.partitions(app.sink, f"the sink of app {app.name!r}, topic")
            sink_limit = int(self.setting(app.sink, "max.message.bytes"))
            stamps = self.setting(app.sink, "message.timestamp.type") == "LogAppendTime"
        if app.telemetry is not None:
            self._offer(app.telemetry_topic, TELEMETRY)
        source_limit = self.setting(app.source, "max.message.bytes")
        self.ensure(app.dlq, count, {"max.message.bytes": str(int(source_limit) + DEAD_LETTER_ROOM)})
        if app.ledger is not None:
            self.ensure(app.ledger_topic, count, {})
        if app.state not in self.topics():  # else it has the layout in force: the planner makes it grow
            # What was written last is not compacted: small segments keep that little, and a task reads all of it.
            # A lane's record has the key of its message, which may be as large as the source allows.
            room = max(int(STATE["max.message.bytes"]), int(source_limit) + STATE_ROOM)
            self.ensure(app.state, count, STATE | {"max.message.bytes": str(room)})
        known = min(count, self.partitions(app.state))
        return Topics(partitions=known, sink_limit=sink_limit, sink_stamps=stamps)

    def _offer(self, topic: str, config: dict[str, str]) -> None:
        """Ask for a topic of one partition without waiting for it: who writes there can do without."""
        if topic in self.topics():
            return
        new = NewTopic(topic, num_partitions=1, replication_factor=-1, config=config)

        def answered(future: Future[None]) -> None:
            error = future.exception()
            if isinstance(error, KafkaException) and (
                error.args[0].code() != ClientError.TOPIC_ALREADY_EXISTS
            ):
                log.warning(
                    "topic %r could not be created (%s): the app runs without telemetry",
                    topic,
                    error.args[0].str(),
                )

        self._admin.create_topics([new], request_timeout=REQUEST_SECONDS)[topic].add_done_callback(answered)

    def ensure(self, topic: str, partitions: int, config: dict[str, str]) -> None:
        """Create the topic, or give it more partitions when it has fewer."""
        have = self.topics().get(topic)
        if have is None:
            self.create(topic, partitions, config)
        elif have < partitions:
            more = [NewPartitions(topic, partitions)]
            self._wait(
                self._admin.create_partitions(more, request_timeout=REQUEST_SECONDS),
                f"topic {topic!r} could not grow",
            )
        self._wait_for(topic, partitions)

    def create(
        self, topic: str, partitions: int, config: Mapping[str, str], *, replication: int = -1
    ) -> bool:
        """Create the topic, and wait until the cluster knows it; False when it was there already."""
        new = NewTopic(topic, num_partitions=partitions, replication_factor=replication, config=dict(config))
        try:
            self._admin.create_topics([new], request_timeout=REQUEST_SECONDS)[topic].result()
        except KafkaException as error:
            if error.args[0].code() != ClientError.TOPIC_ALREADY_EXISTS:
                raise BrokerError(f"topic {topic!r} could not be created: {error.args[0].str()}") from error
            return False
        else:
            self._wait_for(topic, partitions)
            return True

    def _wait_for(self, topic: str, partitions: int) -> None:
        deadline = time.monotonic() + REQUEST_SECONDS
        while self.topics().get(topic, 0) < partitions and time.monotonic() < deadline:
            time.sleep(0.02)  # created is not yet known to everyone

    def setting(self, topic: str, name: str) -> str:
        """One setting of a topic."""
        resource = ConfigResource(ResourceType.TOPIC, topic)
        answer = self._wait(
            self._admin.describe_configs([resource], request_timeout=REQUEST_SECONDS),
            f"settings of topic {topic!r} could not be read",
        )
        return str(answer[name].value)

    def rules(self, topics: Iterable[str]) -> dict[str, TopicRules]:
        """What these topics take. Of one whose settings may not be read, nothing is known."""
        resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
        asked = self._admin.describe_configs(resources, request_timeout=REQUEST_SECONDS) if resources else {}
        return {resource.name: _rules(future) for resource, future in asked.items()}

    def ends(
        self, topic: str, partitions: Iterable[int], *, earliest: bool = False, committed: bool = False
    ) -> dict[int, int]:
        """The end (or the beginning) of each partition: the offset that the next message will get.

        ``committed``: the end is where the first open transaction begins.
        """
        return self.all_ends([topic], partitions, earliest=earliest, committed=committed)[topic]

    def all_ends(
        self,
        topics: Sequence[str],
        partitions: Iterable[int],
        *,
        earliest: bool = False,
        committed: bool = False,
    ) -> dict[str, dict[int, int]]:
        """The same of several topics, by one question."""
        spec = OffsetSpec.earliest() if earliest else OffsetSpec.latest()  # type: ignore[no-untyped-call]
        wanted = list(partitions)
        found = self.offsets({(topic, p): spec for topic in topics for p in wanted}, committed=committed)
        return {topic: {p: found[topic, p] for p in wanted} for topic in topics}

    def offsets(
        self, asked: Mapping[tuple[str, int], OffsetSpec], *, committed: bool = False
    ) -> dict[tuple[str, int], int]:
        """What each specification means in its topic and partition; -1 for a time after the last message.

        ``committed``: the end is where the first open transaction begins.
        """
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        request = {TopicPartition(*place): spec for place, spec in asked.items()}

        def ask() -> dict[tuple[str, int], int]:
            futures = self._admin.list_offsets(request, isolation_level=level, request_timeout=_ANSWER)
            found = {(at.topic, at.partition): int(f.result().offset) for at, f in futures.items()}
            if OFFSET_INVALID in found.values():
                # The leader of such a partition has died. The client says no word about it, and asks the same one
                # again, for minutes, unless it is made to look who leads now.
                self._admin.list_topics(timeout=REQUEST_SECONDS)
                raise KafkaException(ClientError(ClientError.LEADER_NOT_AVAILABLE))
            return found

        try:
            return patiently(ask, _NEW_LEADER) if request else {}
        except KafkaException as error:
            topics = ", ".join(sorted({repr(topic) for topic, _ in asked}))
            raise BrokerError(
                f"offsets of topic {topics} could not be read: {error.args[0].str()}"
            ) from error

    def members(self, group: str) -> int | None:
        """Consumers that have joined a group; None when the cluster does not say."""
        try:
            return patiently(
                lambda: len(
                    self._admin.describe_consumer_groups([group])[group].result(REQUEST_SECONDS).members
                )
            )
        except (KafkaException, TimeoutError):
            return None

    def committed(
        self, group: str, topic: str, partitions: Iterable[int], *, settled: bool = False
    ) -> dict[int, tuple[int, str | None]]:
        """The group's committed offsets with their metadata; partitions without one are left out.

        A transaction that is about to change them is waited for: if ``settled`` until it is over, else for a second.
        That of a process which was killed in the middle of one lasts for a minute unless somebody fences it, so only an
        owner, who has done so, asks for what is settled.

        Asked through a consumer of its own: one that is to fetch would take a second longer for its first fetch after
        this question, and the admin client's call for it crashes the process (confluent-kafka 2.16.1).
        """
        asked = [TopicPartition(topic, p) for p in partitions]
        try:
            if settled:
                found = patiently(lambda: self._reader(group).committed(asked, timeout=REQUEST_SECONDS))
            else:
                try:
                    found = self._reader(group).committed(asked, timeout=_SETTLES)
                except KafkaException:
                    reader = self._reader(group, "read_uncommitted")
                    found = patiently(lambda: reader.committed(asked, timeout=REQUEST_SECONDS))
        except KafkaException as error:
            raise BrokerError(
                f"progress of group {group!r} could not be read: {error.args[0].str()}"
            ) from error
        for at in found:
            if at.error is not None:
                raise BrokerError(f"progress of group {group!r} could not be read: {at.error.str()}")
        return {at.partition: (at.offset, at.metadata) for at in found if at.offset >= 0}

    def progress(
        self, group: str, source: TopicIdentity, partitions: Iterable[int], *, settled: bool = False
    ) -> dict[int, Committed]:
        """The group's committed offsets that belong to this topic; partitions without one are left out.

        So is an offset of a topic that had the same name before: it means nothing in this one.
        """
        found = {}
        for partition, (offset, metadata) in self.committed(
            group, source.topic, partitions, settled=settled
        ).items():
            judged = judge(offset, metadata, source)
            if judged is not None:
                found[partition] = judged
            elif (source, partition) not in self._told:
                self._told.add((source, partition))
                log.warning(
                    "ignoring committed offset of a deleted topic topic=%s partition=%d offset=%d topic_id=%s: the "
                    "topic was deleted and created again",
                    source.topic,
                    partition,
                    offset,
                    source.id,
                )
        return found

    def _reader(self, group: str, level: str = "read_committed") -> Consumer:
        if (group, level) not in self._readers:
            self._readers[group, level] = self._settings.consumer(group, **{"isolation.level": level})
        return self._readers[group, level]

    @staticmethod
    def _wait(futures: dict[Any, Any], what: str) -> Any:
        answer = None
        for future in futures.values():
            try:
                answer = future.result()
            except KafkaException as error:
                if error.args[0].code() != ClientError.TOPIC_ALREADY_EXISTS:
                    raise BrokerError(f"{what}: {error.args[0].str()}") from error
        return answer
