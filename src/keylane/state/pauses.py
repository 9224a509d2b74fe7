"""Pauses as records of the state topic: what operators have paused, by whom and why.

A pause is in every partition that it concerns, so that each task finds it when it starts and while it runs: one of a
partition in that partition, all others in all partitions. It holds until the record is deleted, over any restart.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from keylane import strict_json as wire
from keylane.state.commands import REASON_CHARACTERS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from keylane.engine.pauses import PauseScope

PAUSE = b"pause/"
PauseKind = Literal["app", "partition", "stage", "key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRecord:
    """One pause."""

    kind: PauseKind
    partition: int | None = None
    """Of a pause of a partition."""
    stage: str = ""
    key: bytes | None = None
    who: str
    at: float
    reason: str = ""

    @property
    def name(self) -> bytes:
        """The record's key in the state topic."""
        own = {"stage": b"/" + self.stage.encode(), "key": b"/" + (self.key or b"")}
        return PAUSE + self.kind.encode() + own.get(self.kind, b"")

    @property
    def scope(self) -> PauseScope:
        """The same for the engine."""
        found = {"partition": self.partition, "stage": self.stage, "key": self.key}
        return self.kind, found.get(self.kind)

    def encode(self) -> bytes:
        """The value for :func:`decode_pause`."""
        return json.dumps({"who": self.who, "at": self.at, "reason": self.reason}).encode()


@wire.decoder
def decode_pause(name: bytes, partition: int, value: bytes) -> PauseRecord:
    """Decode a pause from the state topic. Raises MalformedRecordError."""
    kind_name, _, own = name.removeprefix(PAUSE).partition(b"/")
    kind = kind_name.decode()
    if kind not in get_args(PauseKind):
        raise wire.MalformedRecordError(f"expected one of {', '.join(get_args(PauseKind))}, got {kind!r:.60}")
    who, at, reason = wire.fields(wire.loads(value), "who", "at", "reason")
    return PauseRecord(
        kind=kind,  # type: ignore[arg-type]  # checked above
        partition=partition if kind == "partition" else None,
        stage=own.decode() if kind == "stage" else "",
        key=own if kind == "key" else None,
        who=wire.text(who, 1000),
        at=wire.seconds(at),
        reason=wire.text(reason, REASON_CHARACTERS_MAX),
    )


def scopes_of(pauses: Iterable[PauseRecord]) -> dict[PauseScope, PauseRecord]:
    """What is paused, each once."""
    return {record.scope: record for record in pauses}
