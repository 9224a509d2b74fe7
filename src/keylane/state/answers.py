"""Results of operators' commands, as tasks write them into the state topic."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from keylane import strict_json as wire
from keylane.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveCounts:
    """Numbers of redriven dead letters by :class:`keylane.outcome.Outcome`."""

    ok: int = 0
    duplicate: int = 0
    ignored: int = 0
    stale: int = 0
    dead: int = 0
    parked: int = 0

    @classmethod
    def of(cls, outcomes: Mapping[Outcome, int]) -> RedriveCounts:
        """Make it from a count by outcome."""
        return cls(**{name: outcomes.get(Outcome(name), 0) for name in _NAMES})

    @classmethod
    def total(cls, counts: Iterable[RedriveCounts]) -> RedriveCounts:
        """Add up several lanes."""
        made = list(counts)
        return cls(**{name: sum(getattr(one, name) for one in made) for name in _NAMES})

    @property
    def through(self) -> int:
        """Dead letters with nothing left to do: they ran to their end, or did not have to run."""
        return self.ok + self.duplicate + self.ignored

    def __str__(self) -> str:
        stale = f", {self.stale:,} stale" if self.stale else ""
        return f"{self.through:,} through, {self.dead:,} dead again, {self.parked:,} still parked{stale}"


_NAMES = [field.name for field in fields(RedriveCounts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAnswer:
    """The result of a command. ``owner`` is the task that carried it out."""

    ok: bool
    why: str = ""
    """Text: why it was not carried out, or "done"."""
    counts: RedriveCounts | None = None
    """For a redrive: the outcomes of its dead letters."""
    owner: str
    at: float

    @property
    def result(self) -> str:
        """The result as text."""
        return "; ".join(part for part in (str(self.counts or ""), self.why) if part)

    def encode(self) -> bytes:
        """Return the value for :func:`decode_command_answer`."""
        return json.dumps(asdict(self)).encode()


@wire.decoder
def decode_command_answer(value: bytes) -> CommandAnswer:
    """Decode an answer from the state topic. Raises MalformedRecordError."""
    ok, why, counts, owner, at = wire.fields(wire.loads(value), "ok", "why", "counts", "owner", "at")
    return CommandAnswer(
        ok=wire.boolean(ok),
        why=wire.text(why),
        counts=None if counts is None else _decode_counts(counts),
        owner=wire.text(owner),
        at=wire.seconds(at),
    )


def _decode_counts(found: object) -> RedriveCounts:
    return RedriveCounts(
        **dict(zip(_NAMES, map(wire.integer, wire.fields(found, *_NAMES)), strict=True)),
    )
