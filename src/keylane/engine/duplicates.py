"""Messages that repeat an earlier one of their lane: recognised when they arrive, passed over when their turn comes.

They are recognised on arrival because there everything comes in the order of the log: however long a lane stands still
afterwards, and whoever reads the log again, a duplicate stays one. When its turn comes, the message that it repeats has
finished for good, because everything before it in its lane has, or lies among the letters of a lane that is parked.

Two kinds of messages do not keep to that order. Those that are gone from the log before they ran: nothing repeats them
(:meth:`Duplicates.gone`). And letters, which run when they are redriven although their ids were seen; but of a parked
lane's letters with the same id only one comes through (:meth:`Duplicates.was_redriven`).
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from keylane.core.seen import LONGEST, Idempotency, SeenWindow
from keylane.message import EVENT_ID, Message, last

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from keylane.message import Record

Place = tuple[int, int]
"""Partition and offset."""


class Duplicates:
    """Of one engine; used on its loop only. Without a rule there are none."""

    def __init__(self, rule: Idempotency | None) -> None:
        self.waiting: dict[Place, int] = {}
        """Those that are not done, and the offset of the message that each repeats."""
        self.active = rule is not None
        window = partial(SeenWindow, rule or Idempotency())
        self._windows: dict[int, SeenWindow] = defaultdict(window)  # by partition
        self._redriven: dict[int, SeenWindow] = defaultdict(window)  # the same, of letters that came through

    def arrived(self, records: Sequence[Record], messages: Sequence[Message]) -> None:
        """Messages, and what they were made of, come into their lanes; those of a partition in its order."""
        if not self.active or self._are_new(records, messages):
            return
        for record, message in zip(records, messages, strict=True):
            try:
                headers = record.headers()
            except UnicodeDecodeError:  # the name of one of them: the stages or the sink will find out
                continue
            event_id = last(headers, EVENT_ID) if headers else None
            if event_id and message.key is not None:
                partition, offset = message.partition, message.offset
                repeats = self._windows[partition].arrived(message.key, event_id, offset, message.timestamp)
                if repeats is not None:
                    self.waiting[partition, offset] = repeats

    def _are_new(self, records: Sequence[Record], messages: Sequence[Message]) -> bool:
        """What is true of almost all, found out for many at once: the hot path. False: look at each of them."""
        partitions = {message.partition for message in messages}
        if len(partitions) != 1:
            return False
        longest = LONGEST // 2
        try:  # without headers, a value or a key there is nothing to index or to measure
            names, ids = zip(*[record.headers()[-1] for record in records], strict=True)  # type: ignore[index]
            keys = [message.key for message in messages]
            lengths = list(map(len, ids))
            if names.count(EVENT_ID) < len(names) or not min(lengths) or max(lengths) > longest:
                return False
            if max(map(len, keys)) > longest:  # type: ignore[arg-type]
                return False
        except (TypeError, IndexError, UnicodeDecodeError):
            return False
        offsets = [message.offset for message in messages]
        times = [message.timestamp for message in messages]
        return self._windows[partitions.pop()].all_new((ids, offsets, times, keys))  # type: ignore[arg-type]

    def seen_before(self, records: Iterable[Record]) -> None:
        """Messages that are done come again, in the order of their partition."""
        if self.active:
            seen = list(records)
            messages = [Message(record) for record in seen]
            self.arrived(seen, messages)
            for message in messages:
                self.done(message)

    def done(self, message: Message) -> None:
        """A message that may be a duplicate is done."""
        self.waiting.pop((message.partition, message.offset), None)

    def gone(self, partition: int, offsets: Collection[int]) -> None:
        """These messages are no longer in the log and never ran: what repeats them is all there is."""
        if partition in self._windows:
            self._windows[partition].forget(offsets)
        for place, repeats in list(self.waiting.items()):
            if place[0] == partition and (repeats in offsets or place[1] in offsets):
                del self.waiting[place]

    def came_through(self, letter: Message) -> None:
        """A redriven letter ran to its end."""
        if (known := self._known(letter)) is not None:
            self._redriven[letter.partition].arrived(*known, letter.offset, letter.timestamp)

    def was_redriven(self, letter: Message) -> bool:
        """Whether a letter that this one repeats came through before."""
        if (known := self._known(letter)) is None:
            return False
        window = self._redriven[letter.partition]
        return window.repeated(*known, letter.offset, letter.timestamp) is not None

    def _known(self, message: Message) -> tuple[bytes, bytes] | None:
        """Key and event id."""
        try:
            event_id = last(message.headers, EVENT_ID)
        except UnicodeDecodeError:
            return None
        return (message.key, event_id) if self.active and message.key is not None and event_id else None
