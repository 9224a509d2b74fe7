"""The plan of an epoch, as every Spark task gets it: all parts, and which worker each belongs to.

Spark runs a task in any Python worker that is free. So a task takes the part whose lanes run in its worker already, and
not the part with its own number. A worker without lanes takes a part that nobody has.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from keylane.offsets.assignment import AssignedRange, Assignment
from keylane.offsets.reassignment import match
from keylane.offsets.slots import ALL
from keylane.state.labels import Labels
from keylane.state.ownership import may_be_alive
from keylane.state.topic import StateTopic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from keylane.spec import AppSpec
    from keylane.state.topic import Claim
    from keylane.worker.task_plan import TaskPlan

OWNERS_ATTACH_SECONDS = 2.0
"""How long a worker without lanes leaves a part to the worker that has its lanes, and may still get its task.

At most a quarter of the epoch: otherwise nobody would take the lanes of workers that have died.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """All parts of an epoch's plan.

    ``starts`` and ``since`` are as in :class:`TaskPlan`, for all partitions. ``homes`` is the part of each worker that
    has lanes, by transactional id.
    """

    assignment: Assignment
    starts: Mapping[int, int]
    since: Mapping[int, int] = field(default_factory=dict)
    homes: Mapping[str, int] = field(default_factory=dict)

    def encode(self) -> bytes:
        """For every task of the epoch; small, because there may be thousands of tasks."""
        offsets = [sorted(self.starts.items()), sorted(self.since.items())]
        return zlib.compress(json.dumps([self.assignment.encode(), *offsets, dict(self.homes)]).encode())

    @classmethod
    def decode(cls, value: bytes) -> EpochPlan:
        """The reverse of :meth:`encode`."""
        assignment, starts, since, homes = json.loads(zlib.decompress(value))
        return cls(
            assignment=Assignment.decode(assignment), starts=dict(starts), since=dict(since), homes=homes
        )

    def part(self, number: int, plan: TaskPlan) -> TaskPlan:
        """The task's plan, with this part of the epoch's."""
        ranges = self.assignment.tasks[number]
        return replace(
            plan,
            task=number,
            starts={one.partition: self.starts[one.partition] for one in ranges},
            cuts={one.partition: one.slots for one in ranges if one.slots != ALL},
            since={one.partition: self.since[one.partition] for one in ranges if one.partition in self.since},
        )

    def unowned(self, app: AppSpec, plan: TaskPlan, *, waited: float) -> int | None:
        """A part that no other task of the epoch has, by the claims in the state topic; None if there is none now.

        ``waited``: seconds since the task began. Blocks. Raises BrokerError.
        """
        state = StateTopic(
            plan.settings,
            app.name,
            app.state,
            sorted(self.starts),
            plan.run,
            since=self.since,
            labels=Labels(plan.identity),
        )
        try:
            state.restore()
            owners = [
                (p, owner, claim)
                for p, found in state.owners.items()
                for owner, claim in found.items()
                if claim.run == plan.run and not claim.leaving
            ]
        finally:
            state.close()
        claims = [(p, claim) for p, _, claim in owners if claim.epoch == plan.epoch]
        homes = set[int]()
        if waited < min(OWNERS_ATTACH_SECONDS, plan.seconds / 4):
            alive = {owner for _, owner, claim in owners if may_be_alive(claim.who)}
            homes = {number for owner, number in self.homes.items() if owner in alive}
        free = list[int]()
        for number in self._in_order(plan.spark_task):
            found = list(_claims_of(self.assignment.tasks[number], claims))
            if any(claim.task == plan.spark_task for claim in found):
                return number  # an earlier attempt of this task had it
            if not found and number not in homes:
                free.append(number)
        return free[0] if free else None

    def _in_order(self, first: int) -> Iterator[int]:
        """All parts, in an order that differs from task to task."""
        count = len(self.assignment.tasks)
        return ((first + number) % count for number in range(count))


def homes(assignment: Assignment, owners: Mapping[int, Mapping[str, Claim]], run: str) -> dict[str, int]:
    """The part of each worker of this run that has lanes, so that as few slots as possible move.

    ``owners`` are the claims by partition and transactional id.
    """
    owned: dict[str, list[AssignedRange]] = {}
    for partition, claims in owners.items():
        for owner, claim in claims.items():
            if claim.run == run and claim.epoch >= 0 and not claim.leaving:
                owned.setdefault(owner, []).append(AssignedRange(partition, claim.slots))
    return match(assignment.tasks, owned)


def _claims_of(ranges: tuple[AssignedRange, ...], claims: list[tuple[int, Claim]]) -> Iterator[Claim]:
    for one in ranges:
        for partition, claim in claims:
            if partition == one.partition and claim.slots.overlaps(one.slots):
                yield claim
