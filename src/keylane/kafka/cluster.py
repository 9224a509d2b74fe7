"""Queries to the cluster, and creation of the topics that an app owns."""

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

from keylane.denial import broker_error, is_denied
from keylane.errors import AccessDeniedError, BrokerError
from keylane.kafka.rejection import NO_RULES, TopicRules
from keylane.kafka.settings import outage
from keylane.offsets.identity import AppIdentity, TopicIdentity
from keylane.offsets.metadata import judge
from keylane.rights import Operation, on_group, on_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from confluent_kafka import Consumer, Producer
    from confluent_kafka.admin import ClusterMetadata  # type: ignore[attr-defined]

    from keylane.kafka.settings import KafkaSettings
    from keylane.offsets.metadata import Committed
    from keylane.rights import Right
    from keylane.spec import AppSpec

log = logging.getLogger("keylane.kafka")

REQUEST_SECONDS = 10.0
"""Time for the cluster to answer a request."""
PLANNER_RETRY_SECONDS = 60.0
"""Time for which a :func:`wait_for_cluster` call is retried."""
STATE_SEGMENT_BYTES = 32 << 20
STATE_CONFIG = {
    "cleanup.policy": "compact",
    "segment.bytes": str(STATE_SEGMENT_BYTES),
    # Kafka's own default. A broker may have a lower one, and a record of large progress must fit.
    "max.message.bytes": "1048588",
}
"""Settings of the state topic."""
STATE_ROOM_BYTES = 65_536
"""By how much a record of the state topic or the ledger may be larger than the key of its message."""
TELEMETRY_CONFIG = {"retention.ms": "86400000", "segment.ms": "3600000", "segment.bytes": str(16 << 20)}
"""One day, in segments of an hour at most, because a segment is deleted as a whole."""
DEAD_LETTER_ROOM_BYTES = 65_536
"""By how much a dead letter may be larger than its message: the failure's context."""

_NAMES_SECONDS = 1.0
"""Time without an answer after which the names of the hosts are checked."""
_COMMITTED_SECONDS = 1.0
"""Time for which a query for committed offsets waits for a transaction that is about to change them."""
_LIST_OFFSETS_SECONDS = 3.0
_NEW_LEADER_SECONDS = 25.0
"""Time for a partition to get a new leader. Brokers notice a dead one after 9 s."""
_WARN_EVERY_SECONDS = 10.0
_MOVING_CODES = (
    ClientError.NOT_LEADER_FOR_PARTITION,
    ClientError.LEADER_NOT_AVAILABLE,
    ClientError.FENCED_LEADER_EPOCH,  # this client's metadata is older than the leader
    ClientError.UNKNOWN_LEADER_EPOCH,
    ClientError.UNKNOWN_TOPIC_OR_PART,  # a new topic that not every broker knows yet
    ClientError.NOT_COORDINATOR,
    ClientError.COORDINATOR_NOT_AVAILABLE,
    ClientError.COORDINATOR_LOAD_IN_PROGRESS,
)

P = ParamSpec("P")
T = TypeVar("T")


def retry_while_moving(call: Callable[[], T], seconds: float = REQUEST_SECONDS) -> T:
    """Retry a call while a leader or coordinator is elected or moves, for this time at most."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except KafkaException as error:
            if error.args[0].code() not in _MOVING_CODES or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def load_metadata(client: Consumer | Producer, topic: str) -> None:
    """Load the topic's metadata into a new consumer. On its own it does so up to a second after its assignment.

    Likewise into any client when partitions were added. From any thread. Raises BrokerError if the topic cannot be
    read.
    """
    try:
        found = client.list_topics(topic, timeout=REQUEST_SECONDS).topics.get(topic)
    except KafkaException as error:
        raise broker_error(f"topic {topic!r} cannot be read", error.args[0]) from error
    if found is not None and found.error is not None and is_denied(found.error):
        right = on_topic(topic, Operation.READ)
        raise broker_error(f"topic {topic!r} cannot be read", found.error, right)


def wait_for_cluster(call: Callable[P, T]) -> Callable[P, T]:
    """Decorator for the planner's calls: retries BrokerError for :data:`PLANNER_RETRY_SECONDS`, then raises it.

    AccessDeniedError is raised at once.

    A planner that fails ends the query and all its tasks. It stops retrying when its Spark process has ended.
    """

    @functools.wraps(call)
    def retrying(*args: P.args, **named: P.kwargs) -> T:
        began, parent = time.monotonic(), os.getppid()
        warned = began - _WARN_EVERY_SECONDS
        while True:
            try:
                return call(*args, **named)
            except AccessDeniedError:
                raise
            except BrokerError as error:
                now = time.monotonic()
                if now - began >= PLANNER_RETRY_SECONDS or os.getppid() != parent:
                    raise BrokerError(f"{error}; waited for {now - began:.0f} s") from error
                if now - warned >= _WARN_EVERY_SECONDS:
                    warned = now
                    log.warning("%s; retrying for up to %g s", error, PLANNER_RETRY_SECONDS)
                time.sleep(0.5)

    return retrying


@dataclass(frozen=True, slots=True, kw_only=True)
class AppTopics:
    """What an app needs to know about its topics."""

    partitions: int
    """Of the source."""
    sink_limit: int
    """The first sink's ``max.message.bytes``; 0 without a sink."""
    sink_stamps: bool
    """Whether the first sink replaces the timestamps of records with its own."""


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
        limit=int(found["max.message.bytes"].value),
        max_age_ms=max_age_ms,
        max_ahead_ms=max_ahead_ms,
        stamps=overwrites,
    )


class Cluster:
    """The cluster behind a bootstrap address. Methods raise :class:`BrokerError` if it does not answer."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._admin = settings.admin()  # kept: the futures of a garbage-collected client never complete
        self._group_consumers: dict[tuple[str, str], Consumer] = {}
        self._warned: set[tuple[TopicIdentity, int]] = set()

    def topics(self) -> dict[str, int]:
        """The topics and their numbers of partitions."""
        try:
            found = self._list_topics()
        except KafkaException as error:
            self._admin.poll(0)  # serves error_cb, which explain_no_answer() needs
            raise self._settings.no_answer(REQUEST_SECONDS, error.args[0].str()) from error
        outage.answered()
        return {name: len(topic.partitions) for name, topic in found.topics.items() if topic.error is None}

    def _list_topics(self) -> ClusterMetadata:
        """Ask for the topics. Raises BrokerError after a second when none of the hosts is known to the DNS."""
        try:
            return self._admin.list_topics(timeout=min(_NAMES_SECONDS, REQUEST_SECONDS))
        except KafkaException:
            if unknown := self._settings.unknown_hosts():
                raise BrokerError(
                    f"no Kafka broker at {self._settings.bootstrap}: {unknown}. "
                    "Check the address and this machine's DNS"
                ) from None
        return self._admin.list_topics(timeout=REQUEST_SECONDS)

    def partitions(
        self,
        topic: str,
        what: str = "topic",
        *,
        known: Mapping[str, int] | None = None,
        remedy: str = "Create it, or correct its name",
        operation: Operation = Operation.READ,
    ) -> int:
        """The topic's number of partitions. Raises BrokerError if it does not exist.

        ``what`` begins the message, and ``remedy`` ends it. ``known``: the result of a recent :meth:`topics`, to save
        a request. ``operation``: what the caller does with the topic; the error of a hidden topic names it.
        """
        topics = self.topics() if known is None else known
        if topic not in topics:
            if not self._may_describe(topic):
                raise AccessDeniedError(
                    f"{what} {topic!r}: the broker at {self._settings.bootstrap} lets this user neither see nor use "
                    f"it. Allow this user {on_topic(topic, operation)}"
                )
            names = [name for name in sorted(topics) if not name.startswith("__")]
            existing = f"; existing topics: {', '.join(names[:10])}{' …' if len(names) > 10 else ''}"
            raise BrokerError(
                f"{what} {topic!r} does not exist at {self._settings.bootstrap}"
                f"{existing if names else '; there are no topics'}. {remedy}"
            )
        return topics[topic]

    def _may_describe(self, topic: str) -> bool:
        try:
            self._admin.describe_topics(TopicCollection([topic]), request_timeout=REQUEST_SECONDS)[
                topic
            ].result()
        except KafkaException as error:
            return bool(error.args[0].code() != ClientError.TOPIC_AUTHORIZATION_FAILED)
        return True

    def identity(self, source: str, dlq: str = "") -> AppIdentity:
        """The identities of these topics. A topic that was deleted and created again has a new one.

        The id of a topic that does not exist is empty.
        """
        topics = [topic for topic in (source, dlq) if topic]
        try:
            asked = self._admin.describe_cluster(request_timeout=REQUEST_SECONDS)
            described = self._admin.describe_topics(TopicCollection(topics), request_timeout=REQUEST_SECONDS)
            cluster = str(asked.result().cluster_id)
            ids = {topic: _topic_id(described[topic]) for topic in topics}
        except KafkaException as error:
            names = " and ".join(map(repr, topics))
            rights = [on_topic(topic, Operation.DESCRIBE) for topic in topics]
            raise broker_error(
                f"the topic ids of {names} could not be read", error.args[0], *rights
            ) from error
        of_source, of_dlq = (
            TopicIdentity(cluster=cluster, topic=topic, id=ids.get(topic, "")) for topic in (source, dlq)
        )
        return AppIdentity(source=of_source, dlq=of_dlq)

    def prepare(self, app: AppSpec) -> AppTopics:
        """Check that the source and the sinks exist, and create the app's own topics."""
        count = self.partitions(app.source, f"the source of app {app.name!r}, topic")
        sink_limit, stamps = 0, False
        for sink in app.sinks:
            self.partitions(sink, f"a sink of app {app.name!r}, topic", operation=Operation.WRITE)
        if app.sink is not None:
            sink_limit = int(self.setting(app.sink, "max.message.bytes"))
            stamps = self.setting(app.sink, "message.timestamp.type") == "LogAppendTime"
        if app.telemetry is not None:
            self._create_in_background(app.telemetry_topic, TELEMETRY_CONFIG)
        source_limit = self.setting(app.source, "max.message.bytes")
        self.ensure(app.dlq, count, {"max.message.bytes": str(int(source_limit) + DEAD_LETTER_ROOM_BYTES)})
        # Records of the ledger and of lanes contain their message's key, which may be as large as the source allows.
        limit = max(int(STATE_CONFIG["max.message.bytes"]), int(source_limit) + STATE_ROOM_BYTES)
        if app.ledger is not None:
            self.ensure(app.ledger_topic, count, {"max.message.bytes": str(limit)})
        # It keeps its number of partitions too: the planner adds partitions before those of the state topic.
        if app.keeps_state and app.lane_state not in self.topics():
            self.ensure(app.lane_state, count, STATE_CONFIG | {"max.message.bytes": str(limit)})
        # An existing state topic keeps its number of partitions here: the planner adopts new ones.
        if app.state not in self.topics():
            # The last segment is not compacted, and a task reads all of it, so segments are small.
            self.ensure(app.state, count, STATE_CONFIG | {"max.message.bytes": str(limit)})
        partitions = min(count, self.partitions(app.state))
        return AppTopics(partitions=partitions, sink_limit=sink_limit, sink_stamps=stamps)

    def _create_in_background(self, topic: str, config: dict[str, str]) -> None:
        """Create a topic with one partition, without waiting. A failure is only logged: the app runs without it."""
        if topic in self.topics():
            return
        new = NewTopic(topic, num_partitions=1, replication_factor=-1, config=config)

        def answered(future: Future[None]) -> None:
            error = future.exception()
            if isinstance(error, KafkaException) and (
                error.args[0].code() != ClientError.TOPIC_ALREADY_EXISTS
            ):
                log.warning(
                    "running without telemetry: creating topic %r failed: %s", topic, error.args[0].str()
                )

        self._admin.create_topics([new], request_timeout=REQUEST_SECONDS)[topic].add_done_callback(answered)

    def ensure(self, topic: str, partitions: int, config: dict[str, str]) -> None:
        """Create the topic, or add partitions if it has fewer."""
        have = self.topics().get(topic)
        if have is None:
            self.create(topic, partitions, config)
        elif have < partitions:
            more = [NewPartitions(topic, partitions)]
            self._wait(
                self._admin.create_partitions(more, request_timeout=REQUEST_SECONDS),
                f"partitions could not be added to topic {topic!r}",
                on_topic(topic, Operation.ALTER),
            )
        self._wait_for(topic, partitions)

    def create(
        self, topic: str, partitions: int, config: Mapping[str, str], *, replication: int = -1
    ) -> bool:
        """Create the topic and wait until the cluster knows it. False if it existed already."""
        new = NewTopic(topic, num_partitions=partitions, replication_factor=replication, config=dict(config))
        try:
            self._admin.create_topics([new], request_timeout=REQUEST_SECONDS)[topic].result()
        except KafkaException as error:
            if error.args[0].code() != ClientError.TOPIC_ALREADY_EXISTS:
                raise broker_error(
                    f"topic {topic!r} does not exist and could not be created",
                    error.args[0],
                    on_topic(topic, Operation.CREATE),
                ) from error
            return False
        else:
            self._wait_for(topic, partitions)
            return True

    def _wait_for(self, topic: str, partitions: int) -> None:
        deadline = time.monotonic() + REQUEST_SECONDS
        while self.topics().get(topic, 0) < partitions and time.monotonic() < deadline:
            time.sleep(0.02)  # the brokers learn of it one after another

    def setting(self, topic: str, name: str) -> str:
        """One setting of a topic."""
        resource = ConfigResource(ResourceType.TOPIC, topic)
        answer = self._wait(
            self._admin.describe_configs([resource], request_timeout=REQUEST_SECONDS),
            f"settings of topic {topic!r} could not be read",
            on_topic(topic, Operation.DESCRIBE_CONFIGS),
        )
        return str(answer[name].value)

    def rules(self, topics: Iterable[str]) -> dict[str, TopicRules]:
        """Which records these topics accept. A topic whose settings may not be read gets :data:`NO_RULES`."""
        resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
        futures = (
            self._admin.describe_configs(resources, request_timeout=REQUEST_SECONDS) if resources else {}
        )
        return {resource.name: _rules(future) for resource, future in futures.items()}

    def ends(
        self, topic: str, partitions: Iterable[int], *, earliest: bool = False, committed: bool = False
    ) -> dict[int, int]:
        """The end (or the beginning) of each partition. The end is the offset that the next message gets.

        ``committed``: the end is the last stable offset, where the first open transaction begins.
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
        """The same for several topics, with one request."""
        spec = OffsetSpec.earliest() if earliest else OffsetSpec.latest()  # type: ignore[no-untyped-call]
        numbers = list(partitions)
        found = self.offsets({(topic, p): spec for topic in topics for p in numbers}, committed=committed)
        return {topic: {p: found[topic, p] for p in numbers} for topic in topics}

    def offsets(
        self, specs: Mapping[tuple[str, int], OffsetSpec], *, committed: bool = False
    ) -> dict[tuple[str, int], int]:
        """Resolve each specification in its topic and partition; -1 for a time after the last message.

        ``committed``: see :meth:`ends`.
        """
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        request = {TopicPartition(*place): spec for place, spec in specs.items()}

        def ask() -> dict[tuple[str, int], int]:
            futures = self._admin.list_offsets(
                request, isolation_level=level, request_timeout=_LIST_OFFSETS_SECONDS
            )
            try:
                found = {(at.topic, at.partition): int(f.result().offset) for at, f in futures.items()}
            except KafkaException as error:
                if error.args[0].code() != ClientError._TIMED_OUT:  # noqa: SLF001 - the client's public constant
                    raise
                found = dict.fromkeys(specs, OFFSET_INVALID)
            if OFFSET_INVALID in found.values():
                # The partition's leader has died, or its broker is slow. The client may report no error and ask the
                # same broker for minutes, unless its metadata is refreshed. Without any broker that raises.
                self._admin.list_topics(timeout=REQUEST_SECONDS)
                raise KafkaException(ClientError(ClientError.LEADER_NOT_AVAILABLE))
            return found

        try:
            return retry_while_moving(ask, _NEW_LEADER_SECONDS) if request else {}
        except KafkaException as error:
            names = sorted({topic for topic, _ in specs})
            rights = [on_topic(name, Operation.DESCRIBE) for name in names]
            what = f"offsets of topic {', '.join(map(repr, names))} could not be read"
            raise broker_error(what, error.args[0], *rights) from error

    def members(self, group: str) -> int | None:
        """The number of consumers that have joined the group; None if the cluster does not answer."""
        try:
            return retry_while_moving(
                lambda: len(
                    self._admin.describe_consumer_groups([group])[group].result(REQUEST_SECONDS).members
                )
            )
        except (KafkaException, TimeoutError):
            return None

    def committed(
        self, group: str, topic: str, partitions: Iterable[int], *, stable: bool = False
    ) -> dict[int, tuple[int, str | None]]:
        """The group's committed offsets with their metadata; partitions without one are left out.

        A transaction may be about to change them. With ``stable`` this waits until it is over, otherwise for a second
        at most. The transaction of a killed process stays open for a minute unless its id is fenced, so only an owner
        that has fenced its predecessors asks for stable offsets.

        It uses a consumer of its own: on the fetching consumer the query delays the first fetch by a second, and the
        admin client's call for it crashes the process (confluent-kafka 2.16.1).
        """
        places = [TopicPartition(topic, p) for p in partitions]
        unread = f"the committed offsets of group {group!r} could not be read"
        rights = on_group(group, Operation.READ), on_topic(topic, Operation.DESCRIBE)
        try:
            if stable:
                found = retry_while_moving(
                    lambda: self._group_consumer(group).committed(places, timeout=REQUEST_SECONDS)
                )
            else:
                try:
                    found = self._group_consumer(group).committed(places, timeout=_COMMITTED_SECONDS)
                except KafkaException as error:
                    if is_denied(error.args[0]):
                        raise
                    consumer = self._group_consumer(group, "read_uncommitted")
                    found = retry_while_moving(lambda: consumer.committed(places, timeout=REQUEST_SECONDS))
        except KafkaException as error:
            raise broker_error(unread, error.args[0], *rights) from error
        for at in found:
            if at.error is not None:
                raise broker_error(unread, at.error, *rights)
        return {at.partition: (at.offset, at.metadata) for at in found if at.offset >= 0}

    def progress(
        self, group: str, source: TopicIdentity, partitions: Iterable[int], *, stable: bool = False
    ) -> dict[int, Committed]:
        """The group's committed progress in this topic; partitions without one are left out.

        Offsets of an earlier topic with the same name are left out too. ``stable``: see :meth:`committed`.
        """
        found = {}
        for partition, (offset, metadata) in self.committed(
            group, source.topic, partitions, stable=stable
        ).items():
            judged = judge(offset, metadata, source)
            if judged is not None:
                found[partition] = judged
            elif (source, partition) not in self._warned:
                self._warned.add((source, partition))
                log.warning(
                    "ignoring committed offset of a deleted topic topic=%s partition=%d offset=%d topic_id=%s: the "
                    "topic was deleted and created again",
                    source.topic,
                    partition,
                    offset,
                    source.id,
                )
        return found

    def _group_consumer(self, group: str, level: str = "read_committed") -> Consumer:
        if (group, level) not in self._group_consumers:
            self._group_consumers[group, level] = self._settings.consumer(group, **{"isolation.level": level})
        return self._group_consumers[group, level]

    @staticmethod
    def _wait(futures: dict[Any, Any], what: str, right: Right) -> Any:
        answer = None
        for future in futures.values():
            try:
                answer = future.result()
            except KafkaException as error:
                if error.args[0].code() != ClientError.TOPIC_ALREADY_EXISTS:
                    raise broker_error(what, error.args[0], right) from error
        return answer
