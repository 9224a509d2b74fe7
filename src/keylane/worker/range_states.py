"""The ranges of one worker, and what has to happen next so that it owns what its plan says.

Pure: :class:`~keylane.worker.range_mover.RangeMover` does it, and says here what has happened::

    (absent) ──▶ WAITING ──▶ RESTORING ──▶ RUNNING ──▶ RELEASING ──▶ (absent)
                    └────────▶ (absent)
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from keylane.offsets.assignment import AssignedRange
from keylane.offsets.reassignment import moves

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from keylane.offsets.reassignment import Moves
    from keylane.offsets.slots import Slots


class RangeState(Enum):
    """What a worker is doing with its range of a partition."""

    WAITING = "waiting"
    """It has claimed the range, or is about to, and waits until earlier owners have released it."""
    RESTORING = "restoring"
    """It owns the range and reads its progress."""
    RUNNING = "running"
    """Its messages are fetched and run."""
    RELEASING = "releasing"
    """Nothing new of it starts; what has begun is finished and committed, and then the range is released."""


_FOLLOWS: Mapping[RangeState | None, tuple[RangeState | None, ...]] = {
    None: (RangeState.WAITING,),
    RangeState.WAITING: (RangeState.RESTORING, None),
    RangeState.RESTORING: (RangeState.RUNNING,),
    RangeState.RUNNING: (RangeState.RELEASING,),
    RangeState.RELEASING: (None,),
}


class _Yielded(NamedTuple):
    """Slots of a partition that are left to workers with a plan of this epoch."""

    epoch: int
    slots: tuple[Slots, ...]

    def has(self, wanted: Slots) -> bool:
        """Whether any of the wanted slots are among them."""
        return any(map(wanted.overlaps, self.slots))


class RangeStates:
    """At most one range of each partition. Ranges that are wanted and running are never touched.

    A range whose slots change is released and taken again. So slots that move are never in two of its owners' hands,
    and an owner never waits for another one while it holds what that one waits for.
    """

    def __init__(self, running: Mapping[int, Slots], waiting: Mapping[int, Slots]) -> None:
        self._slots: dict[int, Slots] = {**running, **waiting}
        self._states = dict.fromkeys(running, RangeState.RUNNING) | dict.fromkeys(waiting, RangeState.WAITING)
        self._plan: dict[int, Slots] = {**self._slots}
        self._epoch = -1
        self._yielded: dict[int, _Yielded] = {}
        self._lent: set[int] = set()  # partitions that are wanted again as soon as they are released

    def __getitem__(self, partition: int) -> RangeState | None:
        return self._states.get(partition)

    def slots(self, partition: int) -> Slots:
        """The slots of the range that the worker has there, or is about to have."""
        return self._slots[partition]

    def plan(self, wanted: Mapping[int, Slots], epoch: int) -> None:
        """From now on the worker is to own these ranges. What was left to others in earlier epochs does not count."""
        self._plan, self._epoch = dict(wanted), epoch
        self._yielded = {p: left for p, left in self._yielded.items() if left.epoch >= epoch}

    def leave(self, partition: int, slots: Iterable[Slots], epoch: int) -> None:
        """Leave these slots to other workers, which claim them for their plans of this epoch.

        One of an earlier epoch has not seen its new plan yet: it gets the range, because it does not wait for long, and
        is then asked for it.
        """
        if epoch < self._epoch:
            self._lent.add(partition)
            return
        before = self._yielded.get(partition)
        known = before.slots if before is not None and before.epoch == epoch else ()
        self._yielded = {**self._yielded, partition: _Yielded(epoch, (*known, *slots))}

    def has_left(self, wanted: Mapping[int, Slots], epoch: int) -> bool:
        """Whether some of these ranges were left to another worker of this epoch. From any thread."""
        yielded = self._yielded  # replaced, and never changed
        return any(
            (found := yielded.get(partition)) is not None and found.epoch >= epoch and found.has(slots)
            for partition, slots in wanted.items()
        )

    @property
    def wanted(self) -> dict[int, Slots]:
        """The ranges that the worker is to own now."""
        return {
            p: slots
            for p, slots in self._plan.items()
            if p not in self._lent and not (p in self._yielded and self._yielded[p].has(slots))
        }

    @property
    def owned(self) -> dict[int, Slots]:
        """The ranges that it owns."""
        return {p: slots for p, slots in self._slots.items() if self._states[p] is not RangeState.WAITING}

    def moves(self) -> Moves:
        """How it gets from what it owns to what it is to own."""
        return moves(self.owned, self.wanted)

    @property
    def to_release(self) -> list[AssignedRange]:
        """Running ranges of which slots are not wanted, or more are."""
        changed = {one.partition for one in (*self.moves().release, *self.moves().take)}
        return [AssignedRange(p, self._slots[p]) for p in sorted(changed) if self[p] is RangeState.RUNNING]

    @property
    def to_take(self) -> list[AssignedRange]:
        """Wanted ranges of partitions in which it has nothing."""
        return [AssignedRange(p, slots) for p, slots in sorted(self.wanted.items()) if self[p] is None]

    def is_wanted(self, partition: int) -> bool:
        """Whether the range that it waits for is still to be taken."""
        return self.wanted.get(partition) == self._slots.get(partition)

    @property
    def over(self) -> bool:
        """Whether it has nothing, and is to have nothing."""
        return not self._states and not self.wanted

    @property
    def moving(self) -> bool:
        """Whether any range is not running."""
        return any(state is not RangeState.RUNNING for state in self._states.values())

    def enter(self, partition: int, state: RangeState | None, slots: Slots | None = None) -> None:
        """This has happened; None: the worker has nothing there any more. Raises ValueError if it cannot be."""
        before = self[partition]
        if state not in _FOLLOWS[before] or (before is None) is (slots is None):
            raise ValueError(f"a range that is {before} cannot be {state}")
        if slots is not None:
            self._slots[partition] = slots
        if state is None:
            del self._slots[partition], self._states[partition]
            self._lent.discard(partition)
        else:
            self._states[partition] = state
