"""Looks at a Kafka cluster: topics, the app's group, its progress, its rights. Writes nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from keylane.doctor.facts import ClusterFacts, GroupFacts, GroupPosition, TopicFacts
from keylane.errors import BrokerError
from keylane.kafka.client import (
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ClientError,
    ConfigResource,
    KafkaException,
    ResourcePatternType,
    ResourceType,
    TopicCollection,
    TopicPartition,
)
from keylane.kafka.cluster import Cluster as Questions
from keylane.kafka.cluster import patiently
from keylane.state.labels import Labels
from keylane.state.topic import StateTopic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.doctor.facts import AppFacts
    from keylane.kafka.settings import KafkaSettings

TIMEOUT = 10.0
_READ = 5.0
_EVERYTHING = frozenset(
    {"CREATE", "ALTER", "DESCRIBE", "CLUSTER_ACTION", "DESCRIBE_CONFIGS", "ALTER_CONFIGS"}
)
"""What a user may do on a cluster where nothing is restricted."""


def probe_cluster(settings: KafkaSettings, app: AppFacts | None) -> ClusterFacts:
    """Everything about the cluster that matters to the app, or to anybody when there is none."""
    began, now = time.monotonic(), time.time()
    try:
        return _Probe(settings, app).look(began, now)
    except BrokerError as error:
        return ClusterFacts(bootstrap=settings.bootstrap, fault=str(error), now=now)


class _Probe:
    def __init__(self, settings: KafkaSettings, app: AppFacts | None) -> None:
        self._settings = settings
        self._app = app
        self._admin = settings.admin()
        self._questions = Questions(settings)

    def look(self, began: float, now: float) -> ClusterFacts:
        app = self._app
        there = self._questions.topics()
        seconds = time.monotonic() - began
        wanted = [] if app is None else [app.source, app.sink, app.dlq, app.state, app.ledger_topic]
        names = [name for name in wanted if name and name in there]
        cluster = self._answer(self._admin.describe_cluster(include_authorized_operations=True))
        rights = _operations(cluster)
        rules, secured = self._rules(rights)
        owners, malformed = self._state(app, there[app.state]) if app and app.state in there else ((), {})
        return ClusterFacts(
            bootstrap=self._settings.bootstrap,
            id="" if cluster is None else str(cluster.cluster_id),
            brokers=len(cluster.nodes) if cluster else self._brokers(),
            seconds=seconds,
            topics={name: self._topic(name) for name in names},
            rights=rights,
            secured=secured,
            transactional=None if app is None else _transactional(rules, secured, app.name),
            group=None if app is None else self._group(app.name),
            positions=self._positions(app.name, app.source) if app and app.source in there else (),
            owners=owners,
            malformed=malformed,
            offsets_kept=None if cluster is None else self._offsets_kept(cluster.nodes),
            now=now,
        )

    def _brokers(self) -> int:
        return len(self._admin.list_topics(timeout=TIMEOUT).brokers)

    def _topic(self, name: str) -> TopicFacts:
        found = self._admin.list_topics(name, timeout=TIMEOUT).topics[name].partitions.values()
        described = self._answer(
            self._admin.describe_topics(TopicCollection([name]), include_authorized_operations=True)[name]
        )
        resource = ConfigResource(ResourceType.TOPIC, name)
        settings = self._answer(self._admin.describe_configs([resource], request_timeout=TIMEOUT)[resource])
        return TopicFacts(
            partitions=len(found),
            replicas=min(len(one.replicas) for one in found),
            behind=sum(len(one.isrs) < len(one.replicas) for one in found),
            leaderless=sum(one.leader < 0 for one in found),
            settings=None if settings is None else {key: str(entry.value) for key, entry in settings.items()},
            rights=_operations(described),
        )

    def _offsets_kept(self, nodes: Sequence[Any]) -> float | None:
        """The shortest that any broker keeps an offset for."""
        found = []
        for node in nodes:
            resource = ConfigResource(ResourceType.BROKER, str(node.id))
            asked = self._admin.describe_configs([resource], request_timeout=TIMEOUT)[resource]
            entry = (self._answer(asked) or {}).get("offsets.retention.minutes")
            if entry is not None:
                found.append(float(entry.value) * 60)
        return min(found, default=None)

    def _group(self, name: str) -> GroupFacts:
        def ask() -> Any:
            asked = self._admin.describe_consumer_groups([name], include_authorized_operations=True)
            return asked[name].result(TIMEOUT)

        try:
            found = patiently(ask)  # a fresh broker makes its coordinator when it is first asked for one
        except KafkaException as error:
            if error.args[0].code() == ClientError.GROUP_ID_NOT_FOUND:  # a group that nobody used so far
                return GroupFacts(state="absent")
            return GroupFacts(unread=f"{error.args[0].name()} {error.args[0].str()}".rstrip(" :"))
        except TimeoutError:
            return GroupFacts(unread=f"no answer within {TIMEOUT:.0f} s")
        members = tuple(f"{one.client_id} at {one.host.lstrip('/')}" for one in found.members)
        return GroupFacts(state=str(found.state), members=members, rights=_operations(found))

    def _positions(self, group: str, topic: str) -> tuple[GroupPosition, ...]:
        partitions = range(self._questions.partitions(topic))
        begins = self._questions.ends(topic, partitions, earliest=True)
        ends = self._questions.ends(topic, partitions)
        committed = self._questions.committed(group, topic, partitions)
        asked: dict[int, list[int]] = {}
        for p in partitions:
            first = max(begins[p], committed[p][0] if p in committed else begins[p])
            asked[p] = [first, ends[p] - 1] if first < ends[p] else [ends[p] - 1]
        times = self._times(
            topic, {p: [at for at in offsets if at >= begins[p]] for p, offsets in asked.items()}
        )
        return tuple(
            GroupPosition(
                partition=p,
                beginning=begins[p],
                end=ends[p],
                committed=committed[p][0] if p in committed else None,
                waiting_since=times.get((p, asked[p][0])) if len(asked[p]) == 2 else None,
                newest=times.get((p, asked[p][-1])),
            )
            for p in partitions
        )

    def _times(self, topic: str, asked: dict[int, list[int]]) -> dict[tuple[int, int], float]:
        """The timestamps of the first messages at or after these offsets; what does not come in time is left out."""
        found: dict[tuple[int, int], float] = {}
        consumer = self._settings.consumer(
            f"{topic}.doctor", **{"queued.min.messages": 1, "enable.partition.eof": True}
        )
        try:
            for place in range(2):
                waiting = {p: offsets[place] for p, offsets in asked.items() if len(offsets) > place}
                if not waiting:
                    continue
                consumer.assign([TopicPartition(topic, p, at) for p, at in waiting.items()])
                deadline = time.monotonic() + _READ
                while waiting and time.monotonic() < deadline:
                    message = consumer.poll(0.2)
                    if message is None or (p := message.partition()) not in waiting:
                        continue
                    at = waiting.pop(p)
                    if message.error() is None:
                        found[p, at] = message.timestamp()[1] / 1000
        except KafkaException as error:
            raise BrokerError(f"topic {topic!r} could not be read: {error.args[0].str()}") from error
        finally:
            consumer.close()
        return found

    def _state(self, app: AppFacts, partitions: int) -> tuple[tuple[str, ...], dict[str, int]]:
        """Who owns partitions, and the records of the state topic that could not be read, by kind."""
        try:
            labels = Labels(self._questions.identity(app.source or "", app.dlq))
            state = StateTopic(self._settings, app.name, app.state, range(partitions), run="", labels=labels)
        except BrokerError:
            return (), {}  # the rights say why
        try:
            state.restore()
        except BrokerError:
            return (), {}
        finally:
            state.close()
        owners = {claim.who for owners in state.owners.values() for claim in owners.values()}
        return tuple(sorted(owners)), dict(state.malformed)

    def _rules(self, rights: frozenset[str] | None) -> tuple[list[Any] | None, bool | None]:
        """All rules, and whether there is an authorizer at all; None where neither can be known.

        A broker without an authorizer has no rules, and allows everything on the cluster (``rights``).
        """
        anything: Any = None  # a filter that asks for no name
        every = AclBindingFilter(
            ResourceType.ANY,
            anything,
            ResourcePatternType.ANY,
            anything,
            anything,
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        try:
            rules = list(self._admin.describe_acls(every, request_timeout=TIMEOUT).result(TIMEOUT))
        except KafkaException as error:
            disabled = error.args[0].code() == ClientError.SECURITY_DISABLED
            return None, False if disabled else None
        except (TimeoutError, ValueError):
            return None, None
        if rules:
            return rules, True
        return None, False if rights is not None and rights >= _EVERYTHING else None

    @staticmethod
    def _answer(future: Any) -> Any:
        """None when the question is not allowed, or not understood."""
        try:
            return future.result(TIMEOUT)
        except (KafkaException, TimeoutError):
            return None


def _operations(described: Any) -> frozenset[str] | None:
    operations = getattr(described, "authorized_operations", None)
    return None if operations is None else frozenset(operation.name for operation in operations)


def _transactional(rules: list[Any] | None, secured: bool | None, app: str) -> bool | None:
    if secured is False:
        return True
    if rules is None:
        return None
    for rule in rules:
        if rule.restype != ResourceType.TRANSACTIONAL_ID:
            continue
        name = rule.name or ""
        covers = name == "*" or (
            rule.resource_pattern_type == ResourcePatternType.PREFIXED and f"{app}.".startswith(name)
        )
        allows = rule.permission_type == AclPermissionType.ALLOW
        if covers and allows and rule.operation in (AclOperation.WRITE, AclOperation.ALL):
            return True
    return False
