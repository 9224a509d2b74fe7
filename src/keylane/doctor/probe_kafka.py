"""Looks at a Kafka cluster: topics, the app's group, its progress, its rights. Writes nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # re-exported there without saying so
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
)

from keylane.doctor.facts import Cluster, Group, Position, Topic
from keylane.errors import KafkaError
from keylane.kafka.cluster import Cluster as Questions
from keylane.kafka.state import State

if TYPE_CHECKING:
    from keylane.doctor.facts import App
    from keylane.kafka.settings import KafkaSettings

TIMEOUT = 10.0
_READ = 5.0


def probe_cluster(settings: KafkaSettings, app: App | None) -> Cluster:
    """Everything about the cluster that matters to the app, or to anybody when there is none."""
    began, now = time.monotonic(), time.time()
    try:
        return _Probe(settings, app).look(began, now)
    except KafkaError as error:
        return Cluster(bootstrap=settings.bootstrap, fault=str(error), now=now)


class _Probe:
    def __init__(self, settings: KafkaSettings, app: App | None) -> None:
        self._settings = settings
        self._app = app
        self._admin = settings.admin()
        self._questions = Questions(settings)

    def look(self, began: float, now: float) -> Cluster:
        app = self._app
        there = self._questions.topics()
        seconds = time.monotonic() - began
        wanted = [] if app is None else [app.source, app.sink, app.dlq, app.state, app.ledger_topic]
        names = [name for name in wanted if name and name in there]
        cluster = self._answer(self._admin.describe_cluster(include_authorized_operations=True))
        rules, secured = self._rules()
        return Cluster(
            bootstrap=self._settings.bootstrap,
            brokers=len(cluster.nodes) if cluster else self._brokers(),
            seconds=seconds,
            topics={name: self._topic(name) for name in names},
            rights=_operations(cluster),
            secured=secured,
            transactional=None if app is None else _transactional(rules, secured, app.name),
            group=None if app is None else self._group(app.name),
            positions=self._positions(app.name, app.source) if app and app.source in there else (),
            owners=self._owners(app.name, app.state, there[app.state]) if app and app.state in there else (),
            now=now,
        )

    def _brokers(self) -> int:
        return len(self._admin.list_topics(timeout=TIMEOUT).brokers)

    def _topic(self, name: str) -> Topic:
        found = self._admin.list_topics(name, timeout=TIMEOUT).topics[name].partitions.values()
        described = self._answer(
            self._admin.describe_topics(TopicCollection([name]), include_authorized_operations=True)[name]
        )
        resource = ConfigResource(ResourceType.TOPIC, name)
        settings = self._answer(self._admin.describe_configs([resource], request_timeout=TIMEOUT)[resource])
        return Topic(
            partitions=len(found),
            replicas=min(len(one.replicas) for one in found),
            behind=sum(len(one.isrs) < len(one.replicas) for one in found),
            leaderless=sum(one.leader < 0 for one in found),
            settings=None if settings is None else {key: str(entry.value) for key, entry in settings.items()},
            rights=_operations(described),
        )

    def _group(self, name: str) -> Group:
        try:
            asked = self._admin.describe_consumer_groups([name], include_authorized_operations=True)
            found = asked[name].result(TIMEOUT)
        except KafkaException as error:
            if error.args[0].code() == ClientError.GROUP_ID_NOT_FOUND:  # a group that nobody used so far
                return Group(state="absent")
            return Group(unread=error.args[0].str())
        except TimeoutError:
            return Group(unread=f"no answer within {TIMEOUT:.0f} s")
        members = tuple(f"{one.client_id} at {one.host.lstrip('/')}" for one in found.members)
        return Group(state=str(found.state), members=members, rights=_operations(found))

    def _positions(self, group: str, topic: str) -> tuple[Position, ...]:
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
            Position(
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
            raise KafkaError(f"topic {topic!r} could not be read: {error.args[0].str()}") from error
        finally:
            consumer.close()
        return found

    def _owners(self, app: str, topic: str, partitions: int) -> tuple[str, ...]:
        state = State(self._settings, app, topic, range(partitions), run="")
        try:
            state.restore()
            return tuple(sorted({claim.who for owners in state.owners.values() for claim in owners.values()}))
        except KafkaError:
            return ()  # the rights say why
        finally:
            state.close()

    def _rules(self) -> tuple[list[Any] | None, bool | None]:
        """All rules, and whether there is an authorizer at all; None where neither can be known.

        Without a single rule there may be an authorizer or not: then the rights on topics tell.
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
        return (rules, True) if rules else (None, None)

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
