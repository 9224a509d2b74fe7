"""Identity of a topic: its cluster, its name, and its Kafka topic id.

An offset is only valid for one topic. A topic that is deleted and created again has the same name and another topic id;
a cluster that is set up again has another cluster id. Everything that Keylane persists about offsets therefore names
the identity of their topic.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicIdentity:
    """One topic. ``id`` is empty if the topic does not exist, or if the cluster has no topic ids."""

    cluster: str
    topic: str
    id: str

    def __str__(self) -> str:
        return f"{self.cluster}/{self.id}/{self.topic}"

    def encode(self) -> bytes:
        """The identity as the value of a record's header. Equal if and only if the identities are equal."""
        return str(self).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class AppIdentity:
    """The topics whose offsets an app persists: its source and its dead letters."""

    source: TopicIdentity
    dlq: TopicIdentity
