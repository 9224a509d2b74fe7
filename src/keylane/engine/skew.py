"""Skew at work: which keys make up most of what a task reads, and a word about those whose lanes fall behind."""

from __future__ import annotations

import logging
from math import sqrt
from random import choices
from typing import TYPE_CHECKING

from keylane.core.hot import HotKey, Summary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from keylane.core.lane import LaneTable
    from keylane.engine.delivery import Delivery
    from keylane.message import Record

log = logging.getLogger("keylane.engine")

EVERY = 5.0
"""Seconds between two looks; each of them halves what was counted before."""
NAMED = 0.01
"""Of the messages: keys with a smaller share are not hot."""
BEHIND_SHARE = 0.05
BEHIND = 100
"""A key with so much of the messages and so many of them waiting is worth a line in the log."""
SAY_EVERY = 60.0
"""Seconds until the same key is worth another one."""
_SAMPLES = 128
"""Of the messages that arrive together about so many are counted, with the weight of those that are left out."""
_SURE = 2.0
"""Standard deviations by which a key's share must be above :data:`NAMED`: of a few samples any key may have two."""
_LONGEST = 1024
"""Bytes of a key, at most: longer ones are not named, so that memory stays bounded."""
_MOST = 10


HotName = tuple[bytes | None, int]
"""A hot key and its partition."""


class Skew:
    """Of one engine; used on its loop only. ``tell`` hears of every key that is named in the log."""

    def __init__(self, table: LaneTable[Delivery], tell: Callable[[HotKey], None]) -> None:
        self._table = table
        self._tell = tell
        self._summary: Summary[HotName] = Summary()
        self._samples = 0.0  # that are in it
        self.names: frozenset[HotName] = frozenset()
        """The keys that were hot at the last look."""
        self._said: dict[tuple[bytes, int], float] = {}

    def arrived(self, records: Sequence[Record]) -> None:
        """Count some of these, drawn at random: every n-th would meet keys that take turns all or not at all.

        50 ns a message when 1,000 come together, 300 when 10 do.
        """
        weight = len(records) / _SAMPLES
        some = records if weight <= 1 else choices(records, k=_SAMPLES)
        self._samples += len(some)
        self._summary.add([(record.key(), record.partition()) for record in some], max(1, weight))

    def hot(self) -> list[HotKey]:
        """The keys that lately made up most of what was read, the largest first; a few at most."""
        found = []
        for (key, partition), share in self._summary.top(NAMED):
            sure = share - _SURE * sqrt(share / self._samples)
            if key is not None and len(key) <= _LONGEST and sure >= NAMED:
                waiting = self._table.backlog(key)
                found.append(HotKey(key=key, partition=partition, share=share, waiting=waiting))
        return found[:_MOST]

    def look(self, now: float) -> None:
        """Name the hot keys whose lanes fall behind; to be called every :data:`EVERY` seconds."""
        found = self.hot()
        self.names = frozenset((hot.key, hot.partition) for hot in found)
        for hot in found:
            if hot.share < BEHIND_SHARE or hot.waiting < BEHIND:
                continue
            name = hot.key, hot.partition
            if now - self._said.get(name, -SAY_EVERY) < SAY_EVERY:
                continue
            self._said[name] = now
            log.warning(
                "key %r of partition %d is hot: %.0f%% of the messages that this task reads are its own, and %d wait "
                "in its lane, which runs one at a time; other lanes go on without it",
                hot.key,
                hot.partition,
                100 * hot.share,
                hot.waiting,
            )
            self._tell(hot)
        self._said = {name: said for name, said in self._said.items() if now - said < SAY_EVERY}
        self._summary.fade()
        self._samples /= 2
