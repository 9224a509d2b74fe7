"""What a run of the harness has written down, apart from the sink and the letters: what survives its crashes."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from keylane.errors import KeylaneError
from keylane.offsets.metadata import LIMIT, decode, encode
from keylane.offsets.range_progress import NEVER_MOVED, RangeWatermark, SharedPartition, in_common
from keylane.offsets.slots import ALL
from keylane.offsets.watermark import Watermark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from keylane.engine.version_store import Name
    from keylane.lanes.lane_record import RetryState
    from keylane.offsets.range_progress import Generation, RangeProgress
    from keylane.offsets.slots import Slots
    from keylane.offsets.watermark import PartitionProgress
    from keylane.policies.versions import VersionMark
    from keylane.spec import AppSpec

_RANGES = ""
"""Stands beside an offset whose progress is in the standings of ranges."""
_PROGRESS_MAX = 1_000_000


class DurableState:
    """The group's offsets and the state topic. Written by commits only, each of them whole or not at all."""

    def __init__(self, app: AppSpec) -> None:
        self.versions: dict[Name, VersionMark | None] = {}
        """In the order in which they were written."""
        self.redriven: set[int] = set()
        """Letters that were redriven, by their place among the letters."""
        self._app = app
        self._group: dict[int, tuple[int, str | None]] = {}  # offset and metadata; None: not the app's
        self._standings: dict[int, dict[Slots, RangeProgress]] = defaultdict(dict)
        self._grouped: dict[int, Generation] = {}
        self._kept: dict[int, dict[Slots, dict[int, RetryState]]] = defaultdict(dict)

    def rewind(self, partition: int, offset: int) -> None:
        """Somebody moves the group."""
        self._group[partition] = offset, None

    def write_versions(self, entries: Mapping[Name, VersionMark | None]) -> None:
        """Versions that are done; those written last count."""
        for name, mark in entries.items():
            self.versions.pop(name, None)
            self.versions[name] = mark

    def begin(self, partition: int, slots: Slots = ALL) -> DurablePart:
        """What the owner of these slots begins with."""
        offset, text = self._group.get(partition, (0, None))
        restored = decode(offset, text)
        if restored.problem is not None:
            raise KeylaneError(f"committed progress of partition {partition}: {restored.problem}")
        range_progresses = self._standings[partition].values()
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
        """Attempts that were written down, of messages in these parts that are not done."""
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
        """What writes down how far this part is now, and its attempts. ``leads``: it has the group's offset too."""
        partition, slots, mark = part.partition, part.slots, part.mark
        known = dict(self._standings[partition])
        if isinstance(mark, RangeWatermark):
            segments = mark.segments()
            if slots != ALL or len(segments) > 1:
                standing = known[slots] = part.sharing.range_progress(segments)
                watermark = part.sharing.group_watermark(known.values()) if leads else None
                useless = part.sharing.superseded(known.values()) if watermark is not None else []

                def write_range() -> None:
                    part.written = in_common(segments)
                    self._kept[partition][slots] = kept
                    self._standings[partition][slots] = standing
                    if watermark is not None:
                        self._group[partition] = watermark, _RANGES
                        self._grouped[partition] = part.sharing.generation
                        self._forget(part, useless)

                return write_range
            progress = segments[0].progress
        else:
            progress = mark.progress()
        text = encode(progress, LIMIT if not known else _PROGRESS_MAX)

        def write() -> None:
            part.written = progress
            self._kept[partition][slots] = kept
            self._group[partition] = progress.watermark, text
            if known:
                self._grouped[partition] = part.sharing.generation
                self._forget(part, known.values())

        return write

    def _forget(self, part: DurablePart, range_progresses: Iterable[RangeProgress]) -> None:
        for standing in range_progresses:
            self._standings[part.partition].pop(standing.slots, None)
            if standing.slots != part.slots:
                self._kept[part.partition].pop(standing.slots, None)


class DurablePart:
    """What one task owns of one partition, and how far it is."""

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
        """What this task has committed last."""
        self._app = app

    def is_done(self, slot: int, offset: int) -> bool:
        """Whether this message was done when the part began."""
        if isinstance(self.mark, RangeWatermark):
            return self.mark.is_done(slot, offset)
        return not self.mark.wanted(offset)

    def was_done(self, key: bytes | None, offset: int) -> bool:
        """The same of a message with this key; what is in the slots of others is their concern."""
        slot = self._app.slot_of(key, offset)
        return slot not in self.slots or self.is_done(slot, offset)

    def owns(self, key: bytes | None, offset: int) -> bool:
        """Whether a message of this partition is in these slots."""
        return self.slots == ALL or self._app.slot_of(key, offset) in self.slots
