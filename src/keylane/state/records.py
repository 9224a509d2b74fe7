"""Decoders for small records of the state topic, used by :mod:`keylane.state.topic`.

Each function takes a record's value and returns its content, or raises MalformedRecordError.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from keylane import strict_json as wire
from keylane.offsets.assignment import BUCKETS, Assignment
from keylane.offsets.range_progress import Generation
from keylane.offsets.shard import WHOLE, Shard
from keylane.offsets.slots import ALL, Slots

if TYPE_CHECKING:
    from keylane.offsets.assignment import Load

_NAME_CHARACTERS_MAX = 1000
"""Length of the name of a run, an owner or a topic."""
_TASKS_MAX = 10_000
"""Tasks in a plan: planning time grows with their square."""
_PROGRESS = re.compile(r"([0-9]{1,19}) (.*)", re.ASCII)


@wire.decoder
def decode_run(value: bytes) -> dict[str, Any]:
    """``{"run", "who", "at", "shard"}``: the run that the partition belongs to; one of all partitions has no shard."""
    found = wire.loads(value)
    run, who, at = wire.fields(found, "run", "who", "at")
    return {
        "run": wire.text(run, _NAME_CHARACTERS_MAX),
        "who": wire.text(who, _NAME_CHARACTERS_MAX),
        "at": wire.seconds(at),
        "shard": str(Shard.parse(wire.text(found.get("shard", str(WHOLE)), 20))),
    }


class ClaimRecord(NamedTuple):
    """What a claim says. ``epoch`` and ``task``: see :class:`keylane.state.ownership.Claimant`."""

    run: str
    who: str
    slots: Slots
    leaving: bool
    epoch: int
    task: int
    number: int = 0


@wire.decoder
def decode_claim(value: bytes) -> ClaimRecord:
    """A claim of a worker."""
    found = wire.loads(value)
    run, who = wire.fields(found, "run", "who")
    return ClaimRecord(
        run=wire.text(run, _NAME_CHARACTERS_MAX),
        who=wire.text(who, _NAME_CHARACTERS_MAX),
        slots=Slots.parse(wire.text(found["slots"], 20)) if "slots" in found else ALL,
        leaving=wire.boolean(found.get("leaving", False)),
        epoch=wire.integer(found["epoch"]) if "epoch" in found else -1,
        task=wire.integer(found["task"]) if "task" in found else -1,
        number=wire.integer(found["number"]) if "number" in found else 0,
    )


@wire.decoder
def decode_progress(value: bytes) -> tuple[int, str]:
    """A watermark, and the text of :mod:`keylane.offsets.metadata` that belongs to it."""
    found = _PROGRESS.fullmatch(value.decode("ascii"))
    if found is None:
        raise wire.MalformedRecordError(f"expected a watermark and progress, got {value[:60]!r}")
    return wire.integer(int(found[1])), found[2]


@wire.decoder
def decode_load(value: bytes) -> tuple[str, int, Load]:
    """Run, epoch and counts."""
    run, epoch, counts = wire.row(wire.loads(value), 3)
    load = tuple(map(wire.number, wire.row(counts, BUCKETS)))
    if min(load) < 0:
        raise wire.MalformedRecordError(f"expected counts from 0 on, got {min(load)}")
    return wire.text(run, _NAME_CHARACTERS_MAX), wire.integer(epoch), load


@wire.decoder
def decode_plan(value: bytes) -> dict[str, Any]:
    """``{"run", "epoch", "at", "tasks", "shard", "source"}``, the last two if named; ``tasks`` are an assignment."""
    found = wire.loads(value)
    run, epoch, at, tasks = wire.fields(found, "run", "epoch", "at", "tasks")
    for task in wire.array(tasks, _TASKS_MAX):
        for one in wire.array(task, _TASKS_MAX):
            wire.text(one, 40)
    plan = {
        "run": wire.text(run, _NAME_CHARACTERS_MAX),
        "epoch": wire.integer(epoch),
        "at": wire.seconds(at),
        "tasks": Assignment.decode(tasks).encode(),
        "shard": str(Shard.parse(wire.text(found.get("shard", str(WHOLE)), 20))),
    }
    return plan | ({"source": wire.text(found["source"], _NAME_CHARACTERS_MAX)} if "source" in found else {})


@wire.decoder
def decode_replan(value: bytes) -> dict[str, Any]:
    """``{"run", "number", "tasks"}``: the number of tasks there should be."""
    run, number, tasks = wire.fields(wire.loads(value), "run", "number", "tasks")
    return {
        "run": wire.text(run, _NAME_CHARACTERS_MAX),
        "number": wire.integer(number),
        "tasks": wire.integer(tasks, 1, _TASKS_MAX),
    }


@wire.decoder
def decode_grouped(value: bytes) -> Generation:
    """The generation of the group's offset."""
    return Generation.of(wire.loads(value))


@wire.decoder
def decode_watch(value: bytes) -> float:
    """Until when somebody looks."""
    (until,) = wire.fields(wire.loads(value), "until")
    return wire.seconds(until)


@wire.decoder
def decode_stop(value: bytes) -> str:
    """The run that must end."""
    (run,) = wire.fields(wire.loads(value), "run")
    return wire.text(run, _NAME_CHARACTERS_MAX)


@wire.decoder
def decode_guard_stop(value: bytes) -> tuple[str, str]:
    """The run that must not be started again, and why."""
    run, why = wire.fields(wire.loads(value), "run", "why")
    return wire.text(run, _NAME_CHARACTERS_MAX), wire.text(why)


@wire.decoder
def decode_rest(value: bytes) -> tuple[str, int]:
    """The run, and the offset below which everything is done, except messages of stopped lanes."""
    run, until = wire.fields(wire.loads(value), "run", "until")
    return wire.text(run, _NAME_CHARACTERS_MAX), wire.integer(until)


@wire.decoder
def decode_former(value: bytes) -> tuple[int, ...]:
    """Numbers of partitions that the source had before, ascending."""
    return tuple(wire.integer(count, 1) for count in wire.array(wire.loads(value), 100_000))
