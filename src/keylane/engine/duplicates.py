"""Duplicate detection: repeats of an earlier message of a lane are found on arrival and dropped at their turn.

They are found on arrival because messages arrive in log order: a duplicate stays one, however long its lane is stopped
and whichever task reads the log again. At its turn the message that it repeats has finished, because everything before
it in its lane has finished, or is among the dead letters of a parked lane.

Two kinds of messages are exceptions. Messages deleted from the log before they ran: nothing repeats them
(:meth:`Duplicates.gone`). And redriven dead letters, which run although their ids were seen; but of a parked lane's
letters with the same id only one succeeds (:meth:`Duplicates.was_redriven`): which ones did is rebuilt from the dead
letters that were redriven.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from keylane.message import EVENT_ID, Message, last
from keylane.policies.dedup_window import ID_BYTES_MAX, DedupWindow, Idempotency

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from keylane.lanes.ordering import Ordering
    from keylane.message import Record

Place = tuple[int, int]
"""Partition and offset."""


class Duplicates:
    """The duplicates of one engine. Used only on its loop. Without a rule there are none.

    Nor without lanes: a second message does not wait for the first, so it is not known whether the first will be done.
    """

    def __init__(self, rule: Idempotency | None, order: Ordering) -> None:
        rule = rule if order.has_lanes else None
        self._order = order
        self.waiting: dict[Place, int] = {}
        """Duplicates that are not done, and the offset of the message that each repeats."""
        self._first: dict[Place, int] = {}  # the first one of its event, where that is not the one it repeats
        self.active = rule is not None
        window = partial(DedupWindow, rule or Idempotency())
        self._windows: dict[int, DedupWindow] = defaultdict(window)  # by partition
        self._redriven: dict[int, DedupWindow] = defaultdict(
            window
        )  # the same, of redriven letters that succeeded

    def arrived(
        self, records: Sequence[Record], messages: Sequence[Message], lanes: Sequence[bytes | None] = ()
    ) -> None:
        """Record messages, with their records, as they enter their lanes; those of a partition in log order.

        ``lanes`` are their lanes, if they are known already.
        """
        if not self.active:
            return
        if self._order.reads_messages:  # a key may have several lanes: only what is in one is compared
            lanes = lanes or [self._order.lane_key(message) for message in messages]
            scopes = [_scope(lane, message.key) for lane, message in zip(lanes, messages, strict=True)]
        elif self._are_new(records, messages):
            return
        else:
            scopes = [message.key for message in messages]
        for record, message, scope in zip(records, messages, scopes, strict=True):
            try:
                headers = record.headers()
            except UnicodeDecodeError:  # a header's name: the stages or the sink will report it
                continue
            event_id = last(headers, EVENT_ID) if headers else None
            if event_id and scope is not None:
                partition, offset = message.partition, message.offset
                window = self._windows[partition]
                repeats = window.add(scope, event_id, offset, message.timestamp)
                if repeats is not None:
                    self.waiting[partition, offset] = repeats
                    if (first := window.first(scope, event_id)) is not None and first != repeats:
                        self._first[partition, offset] = first

    def _are_new(self, records: Sequence[Record], messages: Sequence[Message]) -> bool:
        """The hot path: True if all ids of the batch are new. False: check the messages one by one."""
        partitions = {message.partition for message in messages}
        if len(partitions) != 1:
            return False
        longest = ID_BYTES_MAX // 2
        try:  # TypeError or IndexError: a message without headers, value or key
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
        return self._windows[partitions.pop()].add_if_all_new((ids, offsets, times, keys))  # type: ignore[arg-type]

    def note_done_before(self, records: Iterable[Record]) -> None:
        """Record messages that are done and come again, in log order."""
        if self.active:
            seen = list(records)
            messages = [Message(record) for record in seen]
            self.arrived(seen, messages)
            for message in messages:
                self.done(message)

    def first(self, message: Message) -> int | None:
        """The offset of the first message that this duplicate repeats; None if it is none."""
        place = message.partition, message.offset
        return self._first.get(place, self.waiting.get(place))

    def done(self, message: Message) -> None:
        """A message, which may be a duplicate, is done."""
        self.waiting.pop((message.partition, message.offset), None)
        if self._first:
            self._first.pop((message.partition, message.offset), None)

    def gone(self, partition: int, offsets: Collection[int]) -> None:
        """These messages never ran and are no longer in the log: messages that repeat them are not duplicates."""
        if partition in self._windows:
            self._windows[partition].forget(offsets)
        for place, repeats in list(self.waiting.items()):
            if place[0] == partition and (repeats in offsets or place[1] in offsets):
                del self.waiting[place]
                self._first.pop(place, None)

    def forget_partition(self, partition: int) -> None:
        """Another worker has this partition: its event ids are read again when it comes back."""
        self._windows.pop(partition, None)
        self._redriven.pop(partition, None)
        for places in (self.waiting, self._first):
            for place in [place for place in places if place[0] == partition]:
                del places[place]

    def came_through(self, letter: Message) -> None:
        """Parked letters that repeat this message do not run.

        It is a redriven letter that succeeded, now or in an earlier task, or it runs from the log before such letters.
        """
        if (known := self._known(letter)) is not None:
            self._redriven[letter.partition].add(*known, letter.offset, letter.timestamp)

    def was_redriven(self, letter: Message) -> bool:
        """Whether a redriven letter that this one repeats has succeeded before. Then others may repeat this one."""
        if (known := self._known(letter)) is None:
            return False
        window = self._redriven[letter.partition]
        if window.repeated(*known, letter.offset, letter.timestamp) is None:
            return False
        window.add(*known, letter.offset, letter.timestamp)
        return True

    def _known(self, message: Message) -> tuple[bytes, bytes] | None:
        """The message's key and event id; None if it has none, or without a rule."""
        try:
            event_id = last(message.headers, EVENT_ID)
        except UnicodeDecodeError:
            return None
        return (message.key, event_id) if self.active and message.key is not None and event_id else None


def _scope(lane: bytes | None, key: bytes | None) -> bytes | None:
    """A name for a key inside a lane; the length keeps two different pairs apart."""
    return None if lane is None or key is None else b"%d/%s%s" % (len(lane), lane, key)
