"""Durable state of a run of the harness: the group's offsets and the state topic, which survive crashes."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from keylane.errors import KeylaneError
from keylane.offsets.metadata import METADATA_BYTES_MAX, decode, encode
from keylane.offsets.murmur2 import partition_of
from keylane.offsets.range_progress import NEVER_MOVED, RangeWatermark, SharedPartition, in_common
from keylane.offsets.slots import ALL
from keylane.offsets.watermark import Watermark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from keylane.engine.lane_state import Name as ValueName
    from keylane.engine.lane_state import StoredValue
    from keylane.engine.version_store import Name
    from keylane.lanes.lane_record import RetryState
    from keylane.offsets.range_progress import Generation, RangeProgress
    from keylane.offsets.slots import Slots
    from keylane.offsets.watermark import PartitionProgress
    from keylane.policies.versions import VersionMark
    from keylane.spec import AppSpec

_RANGES = ""
"""Metadata of an offset whose progress is recorded by range."""
_PROGRESS_CHARACTERS_MAX = 1_000_000


class DurableState:
    """The group's offsets and the state topic. Only commits write it, each one completely or not at all.

    All of it is about one source topic, but for ``redriven``, which is about the dead letters.
    """

    def __init__(self, app: AppSpec, redriven: set[int] | None = None) -> None:
        self.versions: dict[Name, VersionMark | None] = {}
        """In the order of writing."""
        self.values: dict[ValueName, StoredValue] = {}
        """Lane state."""
        self.redriven: set[int] = set() if redriven is None else redriven
        """Redriven dead letters, by their index in the sink's list."""
        self._app = app
        self._group: dict[int, tuple[int, str | None]] = {}  # offset and metadata; None: set outside Keylane
        self._ranges: dict[int, dict[Slots, RangeProgress]] = defaultdict(dict)
        self._grouped: dict[int, Generation] = {}
        self._kept: dict[int, dict[Slots, dict[int, RetryState]]] = defaultdict(dict)

    def of_new_source(self) -> DurableState:
        """What applies when the source topic was created again: nothing about the old one."""
        return DurableState(self._app, self.redriven)

    def rewind(self, partition: int, offset: int) -> None:
        """Set the group's offset from outside Keylane."""
        self._group[partition] = offset, None

    def write_versions(self, entries: Mapping[Name, VersionMark | None]) -> None:
        """Record versions; a later one of a key replaces an earlier one."""
        for name, mark in entries.items():
            self.versions.pop(name, None)
            self.versions[name] = mark

    def move_values(self, partitions: int) -> None:
        """Move lane state to the partitions where its keys are now, because partitions were added."""
        if not self._app.order.by_key:
            return
        for partition, lane, tag in list(self.values):
            home = partition_of(lane, partitions)
            if home != partition:
                moved = self.values.pop((partition, lane, tag))
                self.values.setdefault((home, lane, tag), moved)

    def begin(self, partition: int, slots: Slots = ALL) -> DurablePart:
        """The progress with which the owner of these slots begins."""
        offset, text = self._group.get(partition, (0, None))
        restored = decode(offset, text)
        if restored.problem is not None:
            raise KeylaneError(f"committed progress of partition {partition}: {restored.problem}")
        range_progresses = self._ranges[partition].values()
        sharing = SharedPartition.begin(
            slots,
            range_progresses,
            self._grouped.get(partition, NEVER_MOVED),
            ours=text is not None,
            offset=offset if partition in self._group else None,
        )
        segments = sharing.inherit(range_progresses, restored.progress)
        mark: Watermark | RangeWatermark
        if slots == ALL and len(segments) == 1:
            mark = Watermark(segments[0].progress)
        else:
            mark = RangeWatermark(slots, segments, self._app.slot_of)
        return DurablePart(partition, slots, mark, sharing, self._app)

    def kept(self, parts: Iterable[DurablePart]) -> dict[tuple[int, int], RetryState]:
        """Recorded attempts of unfinished messages in these parts."""
        kept: dict[tuple[int, int], RetryState] = {}
        for part in parts:
            for records in self._kept[part.partition].values():
                for offset, one in records.items():
                    if one.slot not in part.slots or part.is_done(one.slot, offset):
                        continue
                    known = kept.get((part.partition, offset))
                    if known is None or one.attempts > known.attempts:
                        kept[part.partition, offset] = one
        return kept

    def progress(self, part: DurablePart, kept: dict[int, RetryState], *, leads: bool) -> Callable[[], None]:
        """A function that records the part's present progress and attempts; with ``leads`` also the group's offset."""
        partition, slots, mark = part.partition, part.slots, part.mark
        known = dict(self._ranges[partition])
        if isinstance(mark, RangeWatermark):
            segments = mark.segments()
            if slots != ALL or len(segments) > 1:
                recorded = known[slots] = part.sharing.range_progress(segments)
                watermark = part.sharing.group_watermark(known.values()) if leads else None
                superseded = part.sharing.superseded(known.values()) if watermark is not None else []

                def write_range() -> None:
                    part.written = in_common(segments)
                    self._kept[partition][slots] = kept
                    self._ranges[partition][slots] = recorded
                    if watermark is not None:
                        self._group[partition] = watermark, _RANGES
                        self._grouped[partition] = part.sharing.generation
                        self._forget(part, superseded)

                return write_range
            progress = segments[0].progress
        else:
            progress = mark.progress()
        text = encode(progress, METADATA_BYTES_MAX if not known else _PROGRESS_CHARACTERS_MAX)

        def write() -> None:
            part.written = progress
            self._kept[partition][slots] = kept
            self._group[partition] = progress.watermark, text
            if known:
                self._grouped[partition] = part.sharing.generation
                self._forget(part, known.values())

        return write

    def _forget(self, part: DurablePart, range_progresses: Iterable[RangeProgress]) -> None:
        for found in range_progresses:
            self._ranges[part.partition].pop(found.slots, None)
            if found.slots != part.slots:
                self._kept[part.partition].pop(found.slots, None)


class DurablePart:
    """The part of a partition that one task owns, and its progress."""

    __slots__ = ("_app", "mark", "partition", "sharing", "slots", "written")

    def __init__(
        self,
        partition: int,
        slots: Slots,
        mark: Watermark | RangeWatermark,
        sharing: SharedPartition,
        app: AppSpec,
    ) -> None:
        self.partition = partition
        self.slots = slots
        self.mark = mark
        self.sharing = sharing
        self.written: PartitionProgress | None = None
        """The last commit of this task."""
        self._app = app

    def is_done(self, slot: int, offset: int) -> bool:
        """True if this message was done when the part began."""
        if isinstance(self.mark, RangeWatermark):
            return self.mark.is_done(slot, offset)
        return not self.mark.wanted(offset)

    def was_done(self, key: bytes | None, offset: int) -> bool:
        """The same for a message with this key. True for messages in the slots of other tasks."""
        slot = self._app.slot_of(key, offset)
        return slot not in self.slots or self.is_done(slot, offset)

    def owns(self, key: bytes | None, offset: int) -> bool:
        """True if this message is in the part's slots."""
        return self.slots == ALL or self._app.slot_of(key, offset) in self.slots
