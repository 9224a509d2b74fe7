"""Operators' commands as records of the state topic, and the audit of them.

A command stays in the topic until the task that owns its partition has carried it out. Then the task deletes the record
and writes the result. An app that does not run carries it out when it starts. Every command has its own record, by its
id: none replaces another, and each is answered.
"""

from __future__ import annotations

import getpass
import json
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from keylane import strict_json as wire
from keylane.errors import SettingsError
from keylane.safe_text import valid

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

COMMAND = b"command/"
MESSAGE = b"command/message/"
"""Commands about a message of the source: release, skip."""
LETTERS = b"command/letters/"
"""Commands about dead letters: redrive."""
RESET = b"command/reset/"
"""Commands about the versions of an entity."""
PAUSING = b"command/pause/"
"""Commands that pause or resume: the pause itself is a record of :mod:`keylane.state.pauses`."""
CANCEL = b"command/cancel/"
"""Commands that withdraw another command."""
AUDIT = b"audit/"
AUDITED_COMMANDS = 10_000
"""The newest audit entries of a partition that are kept; older ones are deleted."""
AUDITED_SECONDS = 3600.0
"""Younger entries are kept, however many there are: someone may still wait for the answer."""

REASON_CHARACTERS_MAX = 1000
"""Longest reason of a command."""

CommandKind = Literal["release", "skip", "redrive", "reset", "pause", "resume", "cancel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command.

    Release and skip are about one message: the one at ``offset``, at which the lane is blocked. If the lane is no
    longer blocked there, they do nothing.
    """

    do: CommandKind
    partition: int
    key: bytes | None
    offset: int | None = None
    """Offset of the message; None for dead letters."""
    letters: tuple[int, ...] | None = None
    """Their offsets in the partition of the dead-letter topic; None: all of the lane."""
    to: int | None = None
    """For a reset: the version after this one is next; None: the entity starts over."""
    withdraws: str = ""
    """The id of the command that a cancel withdraws. Both have the same lane."""
    scope: str = ""
    """For a pause: ``app``, ``partition``, ``stage`` or ``key``."""
    stage: str = ""
    """For a pause of a stage."""
    id: str
    who: str
    at: float
    reason: str = ""
    """Why it was given, in the operator's words."""

    @property
    def name(self) -> bytes:
        """The record's key in the state topic."""
        kinds = {"redrive": LETTERS, "reset": RESET, "cancel": CANCEL, "pause": PAUSING, "resume": PAUSING}
        return kinds.get(self.do, MESSAGE) + self.id.encode()

    def encode(self) -> bytes:
        """Return the value for :func:`decode_command`."""
        return json.dumps(
            {
                "do": self.do,
                "key": None if self.key is None else self.key.hex(),
                "offset": self.offset,
                "letters": self.letters,
                "to": self.to,
                "withdraws": self.withdraws,
                "scope": self.scope,
                "stage": self.stage,
                "id": self.id,
                "who": self.who,
                "at": self.at,
                "reason": self.reason,
            }
        ).encode()


@wire.decoder
def decode_command(name: bytes, partition: int, value: bytes) -> Command:
    """Decode a command from the state topic. Raises MalformedRecordError."""
    found = wire.loads(value)
    do, key, offset, letters, to, withdraws, command_id, who, at = wire.fields(
        found, "do", "key", "offset", "letters", "to", "withdraws", "id", "who", "at"
    )
    if do not in get_args(CommandKind):
        raise wire.MalformedRecordError(f"expected one of {', '.join(get_args(CommandKind))}, got {do!r:.60}")
    if do in ("release", "skip") and offset is None:
        raise wire.MalformedRecordError("expected the offset of the message, got none")
    command = Command(
        do=do,
        partition=partition,
        key=None if key is None else bytes.fromhex(wire.text(key, wire.MAX_BYTES)),
        offset=None if offset is None else wire.integer(offset),
        letters=None if letters is None else tuple(map(wire.integer, wire.array(letters))),
        to=None if to is None else wire.integer(to),
        withdraws=wire.text(withdraws, 200),
        scope=wire.text(found.get("scope", ""), 20),  # commands of earlier versions have none
        stage=wire.text(found.get("stage", ""), 1000),
        id=wire.text(command_id, 200),
        who=wire.text(who, 1000),
        at=wire.seconds(at),
        reason=wire.text(found.get("reason", ""), REASON_CHARACTERS_MAX),
    )
    if command.name != name:
        raise wire.MalformedRecordError(f"expected the record of this command at {command.name!r:.200}")
    return command


def new_command_id() -> str:
    """Make an id for a command."""
    return secrets.token_hex(6)


def operator_name() -> str:
    """The operator: user and machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = "?"
    return f"{user}@{socket.gethostname()}"


def check_reason(reason: str) -> str:
    """The reason without white space around it. Raises SettingsError if it is too long."""
    text = valid(reason.strip())
    if len(text) > REASON_CHARACTERS_MAX:
        raise SettingsError(
            f"expected a reason of at most {REASON_CHARACTERS_MAX} characters, got {len(text):,}"
        )
    return text


def audit_name(command_id: str, *, done: bool = False, begun: bool = False) -> bytes:
    """The record's key in the state topic."""
    return AUDIT + command_id.encode() + (b"/done" if done else b"/begun" if begun else b"")


def outdated(audits: Iterable[tuple[bytes, bytes]], open_ids: Container[str], now: float) -> list[bytes]:
    """Names of audit records of one partition to delete. ``audits`` are names and values, the oldest first."""
    by_order: dict[str, list[bytes]] = {}
    values: dict[str, bytes] = {}
    for name, value in audits:
        command_id = name.removeprefix(AUDIT).split(b"/")[0].decode("utf-8", "replace")
        by_order.setdefault(command_id, []).append(name)
        values.setdefault(command_id, value)
    many = list(by_order)[: max(0, len(by_order) - AUDITED_COMMANDS)]
    return [
        name
        for command_id in many
        if command_id not in open_ids and _given_at(values[command_id]) < now - AUDITED_SECONDS
        for name in by_order[command_id]
    ]


def _given_at(value: bytes) -> float:
    try:
        (at,) = wire.fields(wire.loads(value), "at")
        return wire.seconds(at)
    except wire.MalformedRecordError:
        return 0.0
