"""Probe of this user's rights, with requests that change nothing whatever the answer is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keylane.denial import CLUSTER_DENIED, GROUP_DENIED, TOPIC_DENIED, TRANSACTIONAL_ID_DENIED
from keylane.kafka.client import (
    ClientError,
    ConfigResource,
    KafkaException,
    NewTopic,
    ResourceType,
    TopicCollection,
    TopicPartition,
)
from keylane.kafka.cluster import retry_while_moving
from keylane.rights import Operation, ResourceKind, Right

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from keylane.kafka.settings import KafkaSettings

_ANSWER_SECONDS = 10.0
_NO_PARTITION = 2**31 - 1
"""The number of a partition that no topic has."""
_UNSEEN: frozenset[str] = frozenset({"UNSEEN"})
"""In place of the operations on a topic that this user may not see."""
_TIMEOUT_MS_MAX = 2**31 - 1
"""A ``transaction.timeout.ms`` above any broker's limit."""


class RightsProbe:
    """Finds out which of the given rights this user has.

    - Operations on an existing topic: the broker reports them.
    - ``Create``: the broker is asked to validate the topic, not to create it.
    - ``Read`` on a group: an offset is committed for a partition that no topic has. The broker checks the right first.
    - ``Write`` on transactional ids: one is requested with a time-out that no broker grants. The broker checks the
      right first.
    """

    def __init__(self, settings: KafkaSettings, topics: Mapping[str, int], source: str | None) -> None:
        self._settings = settings
        self._admin = settings.admin()
        self._topics = topics
        self._source = source
        self._reported: dict[str, frozenset[str] | None] = {}

    def allowed(self, rights: Iterable[Right]) -> dict[Right, bool]:
        """Each right that is needed now, and whether this user has it; without those that could not be found out."""
        found: dict[Right, bool] = {}
        for right in rights:
            answer = self._ask(right)
            if answer is not None:
                found[right] = answer
        return found

    def _ask(self, right: Right) -> bool | None:
        if right.kind is ResourceKind.TOPIC:
            return (
                self._may_create(right.name) if right.operation is Operation.CREATE else self._on_topic(right)
            )
        if right.kind is ResourceKind.GROUP:
            return self._may_commit(right.name)
        return self._may_begin(f"{right.name}doctor")

    def _on_topic(self, right: Right) -> bool | None:
        if right.operation is Operation.ALTER and self._has_all_partitions(right.name):
            return None
        if right.operation is Operation.DESCRIBE_CONFIGS:
            return self._may_describe_configs(right.name)
        if right.name not in self._reported:
            self._reported[right.name] = self._operations(right.name)
        operations = self._reported[right.name]
        if operations is None or (operations == _UNSEEN and right.operation is Operation.ALTER):
            return None
        return right.operation.name in operations

    def _has_all_partitions(self, topic: str) -> bool:
        return self._topics.get(topic, 1 << 31) >= self._topics.get(self._source or "", 0)

    def _operations(self, topic: str) -> frozenset[str] | None:
        asked = self._admin.describe_topics(TopicCollection([topic]), include_authorized_operations=True)
        try:
            reported = asked[topic].result(_ANSWER_SECONDS).authorized_operations
        except KafkaException as error:
            # Who may not see a topic may neither read nor write it. Nothing is known about the other operations.
            hidden = error.args[0].code() == TOPIC_DENIED
            return _UNSEEN if hidden else None
        except TimeoutError:
            return None
        return None if reported is None else frozenset(each.name for each in reported)

    def _may_describe_configs(self, topic: str) -> bool | None:
        resource = ConfigResource(ResourceType.TOPIC, topic)
        asked = self._admin.describe_configs([resource], request_timeout=_ANSWER_SECONDS)[resource]
        try:
            asked.result(_ANSWER_SECONDS)
        except KafkaException as error:
            return False if error.args[0].code() == TOPIC_DENIED else None
        except TimeoutError:
            return None
        return True

    def _may_create(self, topic: str) -> bool | None:
        if topic in self._topics:
            return None
        new = NewTopic(topic, num_partitions=1, replication_factor=-1)
        answer = self._admin.create_topics([new], validate_only=True, request_timeout=_ANSWER_SECONDS)[topic]
        try:
            answer.result(_ANSWER_SECONDS)
        except KafkaException as error:
            code = error.args[0].code()
            # A topic that exists and that this user may not see: there is nothing to create.
            return (
                None
                if code == ClientError.TOPIC_ALREADY_EXISTS
                else code not in (TOPIC_DENIED, CLUSTER_DENIED)
            )
        except TimeoutError:
            return None
        return True

    def _may_commit(self, group: str) -> bool | None:
        if self._source is None or self._source not in self._topics:
            return None
        if self._is_hidden(group):
            return False
        consumer = self._settings.consumer(group)
        try:
            nowhere = TopicPartition(self._source, _NO_PARTITION, 0)
            answered: Any = consumer.commit(offsets=[nowhere], asynchronous=False)
            code = answered[0].error.code() if answered and answered[0].error else 0
        except KafkaException as error:
            code = error.args[0].code()
        finally:
            consumer.close()
        if code in (0, TOPIC_DENIED, ClientError.UNKNOWN_TOPIC_OR_PART):
            return True
        return False if code == GROUP_DENIED else None

    def _is_hidden(self, group: str) -> bool:
        """Whether this user may not even see the group."""
        try:
            retry_while_moving(
                lambda: self._admin.describe_consumer_groups([group], request_timeout=_ANSWER_SECONDS)[
                    group
                ].result(_ANSWER_SECONDS)
            )
        except KafkaException as error:
            return bool(error.args[0].code() == GROUP_DENIED)
        except TimeoutError:
            return False
        return False

    def _may_begin(self, transactional_id: str) -> bool | None:
        settings: dict[str, Any] = {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": _TIMEOUT_MS_MAX,
            "message.timeout.ms": int(_ANSWER_SECONDS * 1000),
        }
        producer = self._settings.producer(**settings)
        try:
            producer.init_transactions(_ANSWER_SECONDS)
        except KafkaException as error:
            code = error.args[0].code()
            if code == ClientError.INVALID_TRANSACTION_TIMEOUT:
                return True
            return False if code == TRANSACTIONAL_ID_DENIED else None
        return True
