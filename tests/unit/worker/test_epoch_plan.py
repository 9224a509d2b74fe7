"""The plan of an epoch as its tasks get it, without a broker."""

from __future__ import annotations

import os
import socket

from hypothesis import given
from hypothesis import strategies as st

from keylane.offsets.assignment import AssignedRange, Assignment, make_plan
from keylane.offsets.slots import ALL, Slots
from keylane.state.ownership import Claimant, may_be_alive
from keylane.state.topic import Claim
from keylane.worker.epoch_plan import EpochPlan, homes


def claim(
    slots: Slots = ALL, *, run: str = "r", epoch: int = 3, task: int = 0, leaving: bool = False
) -> Claim:
    return Claim(
        place=1, slots=slots, run=run, who="h:1/0", leaving=leaving, heard=0.0, epoch=epoch, task=task
    )


@given(partitions=st.integers(1, 20), tasks=st.integers(1, 30), homed=st.integers(0, 5))
def test_epoch_plan_survives_its_encoding(partitions: int, tasks: int, homed: int) -> None:
    plan = EpochPlan(
        assignment=make_plan(range(partitions), tasks),
        starts={p: p * 10**12 for p in range(partitions)},
        since={p: p * 1000 for p in range(partitions)},
        homes={f"app.{n}": n for n in range(homed)},
    )
    assert EpochPlan.decode(plan.encode()) == plan


def test_epoch_plan_of_ten_thousand_partitions_is_small() -> None:
    ranges = tuple((AssignedRange(p), AssignedRange(p + 5_000)) for p in range(5_000))
    plan = EpochPlan(assignment=Assignment(ranges), starts={p: 10**9 + 7919 * p for p in range(10_000)})
    assert len(plan.encode()) < 100_000


def test_homes_follow_the_claims_of_the_run() -> None:
    assignment = Assignment(((AssignedRange(0),), (AssignedRange(1),)))
    owners = {
        0: {"app.a": claim(), "app.dead": claim(run="former"), "app.task": claim(epoch=-1)},
        1: {"app.b": claim(), "app.leaves": claim(leaving=True)},
    }
    assert homes(assignment, owners, "r") == {"app.a": 0, "app.b": 1}


def test_homes_move_as_little_as_possible() -> None:
    assignment = Assignment(((AssignedRange(0), AssignedRange(1)), (AssignedRange(2),)))
    owners = {0: {"app.a": claim()}, 1: {"app.b": claim()}, 2: {"app.b": claim()}}
    assert homes(assignment, owners, "r") == {"app.a": 0, "app.b": 1}


def test_claimant_of_an_epoch_succeeds_its_own_earlier_attempt() -> None:
    mine, other = Claimant(epoch=3, task=0), Claimant(epoch=3, task=1)
    assert mine.succeeds(claim(epoch=3, task=0))
    assert not other.succeeds(claim(epoch=3, task=0))
    assert other.competes(claim(epoch=3, task=0))
    assert not other.competes(claim(epoch=2, task=0))


def test_claimant_that_ends_with_its_task_competes_with_nobody() -> None:
    assert not Claimant().competes(claim(epoch=-1, task=5))
    assert not Claimant().succeeds(claim(epoch=-1, task=-1))


def test_owner_whose_process_has_ended_is_known_to_be_dead() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert not may_be_alive(f"{socket.gethostname()}:{pid}/0")
    assert may_be_alive(f"{socket.gethostname()}:{os.getpid()}/0")
    assert may_be_alive(f"another-host:{pid}/0")
    assert may_be_alive("no owner's name")
