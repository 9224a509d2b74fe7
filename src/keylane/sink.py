"""A sink of the user's own: results elsewhere than in Kafka."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.message import Headers

SINK_STAGE = "(sink)"
"""Where a message failed whose results the sink did not take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkResult:
    """One result of a message."""

    key: bytes | None
    """The message's, if the result has none of its own."""
    value: bytes | None
    """None for a tombstone: ``Result(None)``."""
    headers: Headers
    """The message's and the result's own, with an ``event-id`` of the result."""
    event_id: str
    """The same in every attempt, so that the sink can recognise a result that it has already."""
    timestamp: int | None
    """In milliseconds since 1970: the message's, if the result has none of its own."""


@runtime_checkable
class Sink(Protocol):
    """Where results go. It travels to the tasks with its app, so it must be picklable while it is not open.

    Each task opens a shallow copy of its own and uses it on its loop: make clients in :meth:`open`. Nothing is left to
    flush when a task ends, because a message is not done before its :meth:`write` has returned.
    """

    async def open(self) -> None:
        """Make clients and connections. An error ends the task."""

    async def write(self, results: Sequence[SinkResult], /) -> None:
        """Return when the sink has all results of one message for good, in order; its lane waits for that.

        Called for many messages at the same time, never for two of one key. What it raises is classified as a stage's
        errors are: the write is tried again, without the stages, or the message fails for good.
        """

    async def close(self) -> None:
        """The task ends. Writes that had not returned were cancelled, and run again in the next task."""
