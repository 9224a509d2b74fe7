"""Types of the Kafka client for other packages: only :mod:`keylane.kafka` imports ``confluent_kafka``."""

from __future__ import annotations

from confluent_kafka import Consumer, KafkaException, Producer, TopicCollection, TopicPartition
from confluent_kafka import KafkaError as ClientError
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # re-exported there without saying so
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

__all__ = [
    "AclBinding",
    "AclBindingFilter",
    "AclOperation",
    "AclPermissionType",
    "AdminClient",
    "ClientError",
    "ConfigResource",
    "Consumer",
    "KafkaException",
    "NewTopic",
    "OffsetSpec",
    "Producer",
    "ResourcePatternType",
    "ResourceType",
    "ScramCredentialInfo",
    "ScramMechanism",
    "TopicCollection",
    "TopicPartition",
    "UserScramCredentialUpsertion",
]
