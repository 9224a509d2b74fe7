"""Probe of a Kafka cluster: topics, the app's group, its progress and its rights. It writes nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from keylane.doctor.facts import ClusterFacts, GroupFacts, GroupPosition, TopicFacts
from keylane.doctor.probe_rights import RightsProbe
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
    TopicPartition,
)
from keylane.kafka.cluster import Cluster, retry_while_moving
from keylane.state.labels import Labels
from keylane.state.topic import StateTopic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.doctor.facts import AppFacts
    from keylane.kafka.settings import KafkaSettings
    from keylane.rights import Right

_ANSWER_TIMEOUT_SECONDS = 10.0
_READ_TIMEOUT_SECONDS = 5.0
_UNRESTRICTED = frozenset(
    {"CREATE", "ALTER", "DESCRIBE", "CLUSTER_ACTION", "DESCRIBE_CONFIGS", "ALTER_CONFIGS"}
)
"""The operations that an unrestricted user has on the cluster."""


def probe_cluster(settings: KafkaSettings, app: AppFacts | None) -> ClusterFacts:
    """Facts about the cluster, and about the app's topics and group when an app is given.

    A cluster that cannot be reached is in ``fault``; what the user may not read is None.
    """
    began, now = time.monotonic(), time.time()
    try:
        return _KafkaProbe(settings, app).facts(began, now)
    except BrokerError as error:
        return ClusterFacts(bootstrap=settings.bootstrap, fault=str(error), now=now)


class _KafkaProbe:
    def __init__(self, settings: KafkaSettings, app: AppFacts | None) -> None:
        self._settings = settings
        self._app = app
        self._admin = settings.admin()
        self._cluster = Cluster(settings)

    def facts(self, began: float, now: float) -> ClusterFacts:
        app = self._app
        existing = self._cluster.topics()
        seconds = time.monotonic() - began
        wanted = []
        if app is not None:
            wanted = [app.source, *app.sinks, app.dlq, app.state, app.lane_state, app.ledger_topic]
        names = [name for name in wanted if name and name in existing]
        cluster = self._answer(self._admin.describe_cluster(include_authorized_operations=True))
        rights = _operations(cluster)
        secured = self._is_secured(rights)
        owners, malformed = (
            self._state(app, existing[app.state]) if app and app.state in existing else ((), {})
        )
        return ClusterFacts(
            bootstrap=self._settings.bootstrap,
            id="" if cluster is None else str(cluster.cluster_id),
            brokers=len(cluster.nodes) if cluster else self._brokers(),
            seconds=seconds,
            topics={name: self._topic(name) for name in names},
            secured=secured,
            allowed={} if app is None or secured is False else self._allowed(app, existing),
            group=None if app is None else self._group(app.name),
            positions=self._positions(app.name, app.source) if app and app.source in existing else (),
            owners=owners,
            malformed=malformed,
            offsets_kept=None if cluster is None else self._offsets_kept(cluster.nodes),
            now=now,
        )

    def _brokers(self) -> int:
        return len(self._admin.list_topics(timeout=_ANSWER_TIMEOUT_SECONDS).brokers)

    def _topic(self, name: str) -> TopicFacts:
        found = (
            self._admin.list_topics(name, timeout=_ANSWER_TIMEOUT_SECONDS).topics[name].partitions.values()
        )
        settings = self._configuration(ResourceType.TOPIC, name)
        return TopicFacts(
            partitions=len(found),
            replicas=min(len(one.replicas) for one in found),
            behind=sum(len(one.isrs) < len(one.replicas) for one in found),
            leaderless=sum(one.leader < 0 for one in found),
            settings=None if settings is None else {key: str(entry.value) for key, entry in settings.items()},
        )

    def _allowed(self, app: AppFacts, existing: dict[str, int]) -> dict[Right, bool]:
        return RightsProbe(self._settings, existing, app.source).allowed(app.rights)

    def _offsets_kept(self, nodes: Sequence[Any]) -> float | None:
        """The shortest time for which any broker keeps an offset."""
        found = []
        for node in nodes:
            entry = (self._configuration(ResourceType.BROKER, str(node.id)) or {}).get(
                "offsets.retention.minutes"
            )
            if entry is not None:
                found.append(float(entry.value) * 60)
        return min(found, default=None)

    def _group(self, name: str) -> GroupFacts:
        def ask() -> Any:
            asked = self._admin.describe_consumer_groups([name])
            return asked[name].result(_ANSWER_TIMEOUT_SECONDS)

        try:
            found = retry_while_moving(ask)  # a new broker creates its coordinator at the first request
        except KafkaException as error:
            if error.args[0].code() == ClientError.GROUP_ID_NOT_FOUND:  # a group that was never used
                return GroupFacts(state="absent")
            return GroupFacts(unread=f"{error.args[0].name()} {error.args[0].str()}".rstrip(" :"))
        except TimeoutError:
            return GroupFacts(unread=f"no answer within {_ANSWER_TIMEOUT_SECONDS:.0f} s")
        members = tuple(f"{one.client_id} at {one.host.lstrip('/')}" for one in found.members)
        return GroupFacts(state=str(found.state), members=members)

    def _positions(self, group: str, topic: str) -> tuple[GroupPosition, ...]:
        partitions = range(self._cluster.partitions(topic))
        begins = self._cluster.ends(topic, partitions, earliest=True)
        ends = self._cluster.ends(topic, partitions)
        committed = self._cluster.committed(group, topic, partitions)
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
        """Timestamps of the first messages at or after these offsets, without those that are not read in time."""
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
                deadline = time.monotonic() + _READ_TIMEOUT_SECONDS
                while waiting and time.monotonic() < deadline:
                    message = consumer.poll(0.2)
                    if message is None or (p := message.partition()) not in waiting:
                        continue
                    at = waiting.pop(p)
                    if message.error() is None:
                        found[p, at] = message.timestamp()[1] / 1000
        except KafkaException as error:
            raise BrokerError(f"could not read topic {topic!r}: {error.args[0].str()}") from error
        finally:
            consumer.close()
        return found

    def _state(self, app: AppFacts, partitions: int) -> tuple[tuple[str, ...], dict[str, int]]:
        """The tasks that own partitions, and the number of malformed records in the state topic by kind."""
        try:
            labels = Labels(self._cluster.identity(app.source or "", app.dlq))
            state = StateTopic(self._settings, app.name, app.state, range(partitions), run="", labels=labels)
        except BrokerError:
            return (), {}  # the findings about rights say why
        try:
            state.restore()
        except BrokerError:
            return (), {}
        finally:
            state.close()
        owners = {claim.who for owners in state.owners.values() for claim in owners.values()}
        return tuple(sorted(owners)), dict(state.malformed)

    def _is_secured(self, rights: frozenset[str] | None) -> bool | None:
        """Whether the cluster has an authorizer; None when that cannot be known.

        A broker without an authorizer has no rules and allows everything on the cluster (``rights``).
        """
        anything: Any = None  # a filter without a name
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
            rules = self._admin.describe_acls(every, request_timeout=_ANSWER_TIMEOUT_SECONDS).result(
                _ANSWER_TIMEOUT_SECONDS
            )
        except KafkaException as error:
            disabled = error.args[0].code() == ClientError.SECURITY_DISABLED
            return False if disabled else None
        except (TimeoutError, ValueError):
            return None
        if rules:
            return True
        return False if rights is not None and rights >= _UNRESTRICTED else None

    def _configuration(self, kind: ResourceType, name: str) -> Any:
        resource = ConfigResource(kind, name)
        return self._answer(
            self._admin.describe_configs([resource], request_timeout=_ANSWER_TIMEOUT_SECONDS)[resource]
        )

    @staticmethod
    def _answer(future: Any) -> Any:
        """The result; None when the broker refuses or does not support the request."""
        try:
            return future.result(_ANSWER_TIMEOUT_SECONDS)
        except (KafkaException, TimeoutError):
            return None


def _operations(described: Any) -> frozenset[str] | None:
    operations = getattr(described, "authorized_operations", None)
    return None if operations is None else frozenset(operation.name for operation in operations)
