"""The commit: one transaction that several contributors fill.

A contributor adds its records and offsets, and hears afterwards whether the transaction was committed. So everything
that belongs to a task's progress is committed with it, or is in the next transaction.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from keylane.kafka.client import TopicPartition
    from keylane.kafka.transactional_writer import StateRecord


class TopicRecord(NamedTuple):
    """A record of another topic than the state topic."""

    topic: str
    value: bytes | None
    key: bytes | None
    partition: int = -1
    """-1: by the key."""
    headers: Sequence[tuple[str, bytes | None]] = ()
    report: Callable[[Any, Any], None] | None = None
    """Called with an error or None, and the record, on the thread of the commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitBatch:
    """The content of one transaction, in addition to the records put into it before. Contributors add to it."""

    last: bool = False
    """Whether this is the worker's last commit."""
    tidy: bool = False
    """Whether to delete records that are superseded: at the end of an epoch, and in the last commit."""
    room: int
    """Size limit for a large record of the state topic, in characters."""
    offsets: list[TopicPartition] = field(default_factory=list)
    """Offsets of the app's group."""
    notes: list[StateRecord] = field(default_factory=list)
    """Records of the state topic."""
    records: list[TopicRecord] = field(default_factory=list)
    """Records of other topics."""

    def note(self, partition: int, name: bytes, value: bytes | None) -> None:
        """Add a record of the state topic; None deletes it."""
        self.notes.append((partition, name, value))


class Contributor(Protocol):
    """Adds to every commit. All three methods are called on the loop's thread and must not block.

    After :meth:`collect` exactly one of the others is called, even if it raised. Neither is called if the loop ends
    during the commit: then its result is unknown.
    """

    def collect(self, batch: CommitBatch, /) -> None:
        """Add what has to be written now."""

    def committed(self) -> None:
        """The transaction was committed: the additions are durable."""

    def aborted(self) -> None:
        """Nothing was written: the next :meth:`collect` must add the same again, or what has replaced it."""


class BatchWriter(Protocol):
    """The part of :class:`~keylane.kafka.transactional_writer.TransactionalWriter` that :func:`commit` uses."""

    @property
    def room(self) -> int:
        """Size limit for a large record of the state topic, in characters."""

    def exclusive(self) -> AbstractAsyncContextManager[None]:
        """Lock out other commits."""

    async def commit_with(
        self,
        offsets: Sequence[TopicPartition],
        state_records: Sequence[StateRecord],
        records: Sequence[TopicRecord],
    ) -> None:
        """Commit these records with those that were put before."""


async def commit(
    writer: BatchWriter, contributors: Sequence[Contributor], *, last: bool = False, tidy: bool = False
) -> None:
    """Collect from all contributors in their order, commit, and notify them in the same order.

    Nothing else runs on the loop from the first ``collect`` until new records wait for the next transaction: whatever
    is done before that is in this one. Raises AbortedError, FencedError, and what a contributor raised.
    """
    async with writer.exclusive():
        batch = CommitBatch(last=last, tidy=tidy or last, room=writer.room)
        asked: list[Contributor] = []
        try:
            for contributor in contributors:
                asked.append(contributor)
                contributor.collect(batch)
            await writer.commit_with(batch.offsets, batch.notes, batch.records)
        except Exception:  # not when the loop ends: then the commit continues in its thread
            _notify([contributor.aborted for contributor in asked])
            raise
        _notify([contributor.committed for contributor in asked])


def _notify(calls: Sequence[Callable[[], None]]) -> None:
    """Call all of them, in order, also when one raises."""
    with ExitStack() as stack:
        for call in reversed(calls):
            stack.callback(call)
