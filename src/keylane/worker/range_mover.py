"""Moves the ranges of one worker one by one, while its other ranges keep running.

A range that leaves starts nothing new. What has begun is finished and committed, and the claim is released in the same
transaction. A range that comes is claimed; when its earlier owners have released it, its progress is restored and its
partition is fetched. Every range moves by itself: none waits for another one's calls.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import TYPE_CHECKING

from keylane.errors import BrokerError
from keylane.state.fences import HANGING_SECONDS
from keylane.state.ownership import LEAVING_EVERY_SECONDS, Turn
from keylane.state.topic import LOAD, part_of
from keylane.worker.commit import Contributor
from keylane.worker.range_states import RangeState, RangeStates

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from keylane.engine.engine import Engine
    from keylane.kafka.fetcher import Fetcher
    from keylane.offsets.slots import Slots
    from keylane.state.ownership import Ownership
    from keylane.state.topic import StateTopic
    from keylane.worker.commands import CommandExecutor
    from keylane.worker.commit import CommitBatch
    from keylane.worker.commit_loop import CommitLoop
    from keylane.worker.held_messages import HeldMessages
    from keylane.worker.progress import ProgressTracker
    from keylane.worker.range_member import RangeMember
    from keylane.worker.task_plan import TaskPlan

log = logging.getLogger("keylane.task")

_LOOK_SECONDS = 0.02
"""Time between two looks whether a range that is wanted is free."""
_TRY_AGAIN_SECONDS = 1.0
"""Until something that the broker did not answer is tried again."""


class RangeMover:
    """The moves of one worker. Used on its loop: call :meth:`look` now and then.

    ``open_view`` reads the state of a partition and blocks; ``is_new`` says whether the source's consumer does not know
    it yet. ``fail`` gets an error that ends the worker. ``members``
    come and go with the ranges, in this order.
    """

    def __init__(
        self,
        *,
        owner: str,
        plan: TaskPlan,
        state: StateTopic,
        ownership: Ownership,
        progress: ProgressTracker,
        engine: Engine,
        held: HeldMessages,
        fetcher: Fetcher,
        commits: CommitLoop,
        commands: CommandExecutor,
        members: Sequence[RangeMember],
        open_view: Callable[[int], StateTopic],
        is_new: Callable[[int], bool],
        fail: Callable[[BaseException], None],
        drain_timeout: float,
    ) -> None:
        self.ranges = RangeStates(ownership.owned, ownership.waiting)
        self.stuck = False
        """Whether a range cannot be released while the others run: then the worker has to drain."""
        self.late = False
        """Whether that is because it did not end in time."""
        self.moved = False
        """Whether any range has come or gone."""
        self._owner = owner
        self._state = state
        self._ownership = ownership
        self._progress = progress
        self._engine = engine
        self._held = held
        self._fetcher = fetcher
        self._commits = commits
        self._commands = commands
        self._members = members
        self._open_view = open_view
        self._is_new = is_new
        self._fail = fail
        self._drain_timeout = drain_timeout
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by partition
        self._plan = plan
        self.ranges.plan(plan.slots, plan.epoch)
        for partition in ownership.waiting:
            self._start(partition, self._take(partition, ownership.waiting[partition]))

    def plan(self, plan: TaskPlan) -> None:
        """Own what this plan says. Call it before the new epoch is told to others."""
        self._plan = plan
        self._commands.plan(plan)
        self.ranges.plan(plan.slots, plan.epoch)
        self.look()

    def release_all(self) -> None:
        """Release every range as soon as what has begun of it has ended."""
        self.ranges.plan({}, self._plan.epoch)
        self.look()

    def look(self) -> None:
        """Start the moves that are due."""
        for partition, claims in self._ownership.requested.items():
            if self.ranges[partition] is RangeState.RESTORING:
                if not self._ownership.is_leaving(partition):  # soon: the other one waits for an answer
                    self._ownership.leaving(partition)
            elif self.ranges[partition] is RangeState.RUNNING and self.ranges.is_wanted(partition):
                for claim in claims:
                    self.ranges.leave(partition, [claim.slots], claim.epoch)
        for one in self.ranges.to_release:
            if self._commands.has_redrives(one.partition):
                self.stuck = True  # their letters are on their way into lanes
                return
            self.ranges.enter(one.partition, RangeState.RELEASING)
            self._ownership.leaving(one.partition)
            self._start(one.partition, self._release(one.partition, one.slots))
        for one in self.ranges.to_take:
            if one.partition not in self._tasks:
                self.ranges.enter(one.partition, RangeState.WAITING, one.slots)
                self._start(one.partition, self._take(one.partition, one.slots))

    def has_left(self, plan: TaskPlan) -> bool:
        """Whether ranges of this plan were left to another worker of its epoch. From any thread."""
        return self.ranges.has_left(plan.slots, plan.epoch)

    def is_running(self, partition: int) -> bool:
        """Whether this worker runs the messages of its range in this partition."""
        return self.ranges[partition] is RangeState.RUNNING

    async def close(self) -> None:
        """Move nothing more."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _start(self, partition: int, move: asyncio._CoroutineLike[None]) -> None:
        self.moved = True
        task = self._tasks[partition] = asyncio.get_running_loop().create_task(move)
        task.add_done_callback(lambda task: self._ended(partition, task))

    def _ended(self, partition: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(partition) is task:
            del self._tasks[partition]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    # A range that leaves.

    async def _release(self, partition: int, slots: Slots) -> None:
        began = time.monotonic()
        last_came = self._held.close(partition)
        self._fetcher.remove(partition)
        self._progress.leaving.add(partition)
        drained = asyncio.ensure_future(self._engine.release(partition, slots, self._drain_timeout))
        try:
            while not (await asyncio.wait([drained], timeout=LEAVING_EVERY_SECONDS))[0]:
                self._ownership.leaving(partition)
        finally:
            drained.cancel()
        if not drained.result():
            log.warning(
                "%s: what had begun in partition %d did not end within %g s",
                self._owner,
                partition,
                self._drain_timeout,
            )
            self.stuck = self.late = True
            return
        await last_came.wait()
        await self._commits.commit_release(_Release(self, partition, slots))
        log.info(
            "%s: released partition %d slots %s after %.3f s",
            self._owner,
            partition,
            slots,
            time.monotonic() - began,
        )

    def released(self, partition: int, slots: Slots) -> None:
        """The last progress of the range is committed, and its claim is released."""
        for member in self._members:
            member.release({partition: slots})
        self._held.remove(partition)
        self._ownership.released(partition)
        self._state.drop(partition)
        self.ranges.enter(partition, None)

    # A range that comes.

    async def _take(self, partition: int, slots: Slots) -> None:
        began = time.monotonic()
        if partition not in self._state.partitions:
            await self._follow(partition)
        if partition not in self._ownership.waiting:
            self._ownership.ask({partition: slots})
        if not await self._is_free(partition):
            self._ownership.withdraw(partition)
            self._state.drop(partition)
            self.ranges.enter(partition, None)
            return
        self._ownership.own(partition)
        self.ranges.enter(partition, RangeState.RESTORING)
        found = await self._progress.look_up(partition, slots, self._plan.starts[partition])
        begin = self._progress.begin(found)
        for member in self._members:
            member.take({partition: slots})
        self._held.add(partition, self._fetcher.add(partition, begin, new=self._is_new(partition)))
        self.ranges.enter(partition, RangeState.RUNNING)
        self._commands.carry_out(filter(self._commands.is_ours, self._state.commands_of(partition)))
        log.info(
            "%s: took partition %d slots %s after %.3f s",
            self._owner,
            partition,
            slots,
            time.monotonic() - began,
        )

    async def _follow(self, partition: int) -> None:
        while True:
            try:
                view = await asyncio.to_thread(self._open_view, partition)
            except BrokerError as error:
                log.warning("%s: partition %d is not taken yet: %s", self._owner, partition, error)
                await asyncio.sleep(_TRY_AGAIN_SECONDS)
            else:
                break
        self._state.adopt(view)
        await asyncio.to_thread(view.close)

    async def _is_free(self, partition: int) -> bool:
        """Wait until earlier owners have released the range or are fenced. False if it is not to be taken any more."""
        began, fences = time.monotonic(), self._ownership.fences()
        while self.ranges.is_wanted(partition) and self._state.successor is None:
            self._state.poll()
            waited = time.monotonic() - began
            turn = self._ownership.turn(partition, waited)
            if turn is Turn.FREE:
                await asyncio.to_thread(self._ownership.settle, fences, partition)
                return True
            if turn is Turn.TAKEN:
                self.ranges.leave(partition, [self.ranges.slots(partition)], self._plan.epoch)
                return False
            dead = self._ownership.dead(partition, waited) if turn is Turn.DEAD else {}
            if new := {owner: claim for owner, claim in dead.items() if not fences.has(owner, claim)}:
                await asyncio.to_thread(fences.fence, new)
                self._ownership.bury(partition, new)
            if waited > HANGING_SECONDS and not self._ownership.is_visible(partition):
                log.warning("%s: the claim of partition %d cannot be read", self._owner, partition)
                self.stuck = True  # a transaction hangs: a worker that starts looks for it
                return False
            await asyncio.sleep(_LOOK_SECONDS)
        return False

    def load_record(self, partition: int, slots: Slots) -> tuple[bytes, bytes]:
        """What was read of the range in this epoch, for the planner: name and value."""
        plan = self._plan
        value = [plan.run, plan.epoch, self._held.load[partition]]
        return part_of(LOAD, slots), json.dumps(value).encode()

    def keep(self, partition: int) -> None:
        """The release was not committed."""
        self._ownership.keep(partition)

    def release_records(self, partition: int) -> Sequence[tuple[int, bytes, bytes | None]]:
        """The records that release the range when they are committed."""
        return self._ownership.release(partition)


class _Release(Contributor):
    """The release of one range, in the transaction of its last progress."""

    def __init__(self, mover: RangeMover, partition: int, slots: Slots) -> None:
        self._mover = mover
        self._partition = partition
        self._slots = slots

    def collect(self, batch: CommitBatch, /) -> None:
        """Add the release, and what the planner has to know."""
        batch.note(self._partition, *self._mover.load_record(self._partition, self._slots))
        batch.notes.extend(self._mover.release_records(self._partition))

    def committed(self) -> None:
        """The range belongs to others now."""
        self._mover.released(self._partition, self._slots)

    def aborted(self) -> None:
        """The caller tries again."""
        self._mover.keep(self._partition)
