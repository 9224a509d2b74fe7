"""What an operator wants done, as records of the state topic, and what was written down about it.

An order stands until the task that owns its partition has carried it out; then the task takes it back and writes what
came of it. An app that does not run carries it out when it starts.
"""

from __future__ import annotations

import getpass
import json
import secrets
import socket
from dataclasses import dataclass
from typing import Literal

from keylane.core.record import KEYLESS, LANE

ORDER = b"order/"
REDRIVE = b"order/redrive/"
KEYLESS_LETTERS = b"order/redrive-keyless"
AUDIT = b"audit/"

Deed = Literal["release", "skip", "redrive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One order. ``letters`` are places among the dead letters of its partition; None: all of the lane's."""

    do: Deed
    partition: int
    key: bytes | None
    offset: int = 0
    """Of the message, in a lane without a key."""
    letters: tuple[int, ...] | None = None
    id: str
    who: str
    at: float

    @property
    def name(self) -> bytes:
        """The record's key in the state topic: one standing order of a kind per lane."""
        if self.do == "redrive":
            return KEYLESS_LETTERS if self.key is None else REDRIVE + self.key
        lane = KEYLESS + str(self.offset).encode() if self.key is None else LANE + self.key
        return ORDER + lane

    @property
    def lane(self) -> bytes | tuple[int, int]:
        """As the engine calls it: its key, or partition and offset of a message without one."""
        return self.key if self.key is not None else (self.partition, self.offset)

    def encode(self) -> bytes:
        """For :func:`decode_order`."""
        return json.dumps(
            {"do": self.do, "letters": self.letters, "id": self.id, "who": self.who, "at": self.at}
        ).encode()


def decode_order(name: bytes, partition: int, value: bytes) -> Order:
    """An order from the state topic. Raises ValueError, KeyError or TypeError when it makes no sense."""
    found = json.loads(value)
    if found["do"] not in ("release", "skip", "redrive"):
        raise ValueError(f"no deed: {found['do']!r}")
    key: bytes | None = None
    offset = 0
    if name.startswith(REDRIVE):
        key = name.removeprefix(REDRIVE)
    elif name.startswith(ORDER + LANE):
        key = name.removeprefix(ORDER + LANE)
    elif name.startswith(ORDER + KEYLESS):
        offset = int(name.removeprefix(ORDER + KEYLESS))
    elif name != KEYLESS_LETTERS:
        raise ValueError("no lane")
    letters = found["letters"]
    return Order(
        do=found["do"],
        partition=partition,
        key=key,
        offset=offset,
        letters=None if letters is None else tuple(int(letter) for letter in letters),
        id=str(found["id"]),
        who=str(found["who"]),
        at=float(found["at"]),
    )


def new_id() -> str:
    """For an order."""
    return secrets.token_hex(6)


def me() -> str:
    """Who orders: user and machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        user = "?"
    return f"{user}@{socket.gethostname()}"


def audit_name(order_id: str, *, done: bool = False, begun: bool = False) -> bytes:
    """The record's key in the state topic."""
    return AUDIT + order_id.encode() + (b"/done" if done else b"/begun" if begun else b"")
