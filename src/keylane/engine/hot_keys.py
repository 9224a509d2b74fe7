"""Hot key detector: which keys have most of a task's messages, and warnings about those whose lanes fall behind."""

from __future__ import annotations

import logging
from math import sqrt
from random import choices
from typing import TYPE_CHECKING

from keylane.lanes.heavy_hitters import HeavyHitters, HotKey
from keylane.logs import short

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from keylane.engine.delivery import Delivery
    from keylane.lanes.lane_table import LaneTable
    from keylane.message import Record

log = logging.getLogger("keylane.engine")

LOOK_SECONDS = 5.0
"""Seconds between two looks; each look halves the earlier counts."""
HOT_SHARE_MIN = 0.01
"""Keys with a smaller share of the messages are not hot."""
WARN_SHARE_MIN = 0.05
WARN_WAITING_MIN = 100
"""A key with this share of the messages, and this many of them waiting, is logged."""
WARN_INTERVAL_SECONDS = 60.0
"""Time until the same key is logged again."""
_BATCH_SAMPLES = 128
"""Messages counted of a batch; each counts for those that are left out."""
_CONFIDENCE_DEVIATIONS = 2.0
"""Standard deviations by which a key's share must exceed :data:`HOT_SHARE_MIN`, as few samples say little."""
_KEY_BYTES_MAX = 1024
"""Longer keys are not reported, so that memory stays bounded."""
_HOT_KEYS_MAX = 10


HotName = tuple[bytes | None, int]
"""A hot key and its partition."""


class HotKeyDetector:
    """The hot keys of one engine. Used only on its loop. ``tell`` is called with every key that is logged."""

    def __init__(self, table: LaneTable[Delivery], tell: Callable[[HotKey], None]) -> None:
        self._table = table
        self._tell = tell
        self._summary: HeavyHitters[HotName] = HeavyHitters()
        self._samples = 0.0  # the number of samples in the summary
        self.names: frozenset[HotName] = frozenset()
        """The keys that were hot at the last look."""
        self._said: dict[tuple[bytes, int], float] = {}

    def arrived(self, records: Sequence[Record]) -> None:
        """Count a random sample of these; with every n-th, keys that alternate would be counted always or never."""
        weight = len(records) / _BATCH_SAMPLES
        some = records if weight <= 1 else choices(records, k=_BATCH_SAMPLES)
        self._samples += len(some)
        self._summary.add([(record.key(), record.partition()) for record in some], max(1, weight))

    def hot(self) -> list[HotKey]:
        """The keys with most of the recently fetched messages, the largest first; at most ten."""
        found = []
        for (key, partition), share in self._summary.top(HOT_SHARE_MIN):
            sure = share - _CONFIDENCE_DEVIATIONS * sqrt(share / self._samples)
            if key is not None and len(key) <= _KEY_BYTES_MAX and sure >= HOT_SHARE_MIN:
                waiting = self._table.backlog(key)
                found.append(HotKey(key=key, partition=partition, share=share, waiting=waiting))
        return found[:_HOT_KEYS_MAX]

    def look(self, now: float) -> None:
        """Log the hot keys whose lanes fall behind. Call it every :data:`LOOK_SECONDS` seconds."""
        found = self.hot()
        self.names = frozenset((hot.key, hot.partition) for hot in found)
        for hot in found:
            if hot.share < WARN_SHARE_MIN or hot.waiting < WARN_WAITING_MIN:
                continue
            name = hot.key, hot.partition
            if now - self._said.get(name, -WARN_INTERVAL_SECONDS) < WARN_INTERVAL_SECONDS:
                continue
            self._said[name] = now
            log.warning(
                "key %r of partition %d is hot: %.0f%% of the messages that this task reads are its own, and %d wait "
                "in its lane, which runs one at a time; other lanes continue",
                short(hot.key),
                hot.partition,
                100 * hot.share,
                hot.waiting,
            )
            self._tell(hot)
        self._said = {name: said for name, said in self._said.items() if now - said < WARN_INTERVAL_SECONDS}
        self._summary.fade()
        self._samples /= 2
