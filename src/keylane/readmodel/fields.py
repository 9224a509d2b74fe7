"""Field of a read model: its type, and where an event has it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import isfinite
from typing import Any

from keylane.errors import Poison, SettingsError
from keylane.handlers.fields import Field

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BEGINNING = datetime.min.replace(tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_KINDS = {int: "a whole number of 64 bits", float: "a number", str: "text", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class ReadModelField:
    """A field of a read model: ``ReadModelField(int, "order.total")`` is a number inside the event's value.

    ``kind`` is ``int``, ``float``, ``str``, ``bool`` or ``datetime``. ``path`` is its place in the value, by default
    the field's own name. A ``datetime`` without a path is the time of the event itself; with a path it is text with a
    time zone, such as ``2026-01-31T12:00:00Z``. Raises :class:`SettingsError` for another kind or a malformed path.
    """

    kind: type
    path: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in (*_KINDS, datetime):
            raise SettingsError(
                f"ReadModelField: kind must be int, float, str, bool or datetime, got {self.kind!r}"
            )
        if self.path is not None:
            Field(self.path)

    @property
    def is_time_of_event(self) -> bool:
        """True when it is the event's own time and not in the value."""
        return self.kind is datetime and self.path is None

    def take(self, where: str, found: Any) -> Any:
        """Convert a value to the table's type. Raises :class:`Poison`, which names ``where``, if it does not fit."""
        if found is None:
            return None
        if self.kind is datetime:
            return parse_time(where, found)
        try:
            fits = _fits(self.kind, found)
        except (OverflowError, UnicodeEncodeError):
            fits = False
        if not fits:
            raise Poison(f"{where}: {found!r:.60} is not {_KINDS[self.kind]}")
        return float(found) if self.kind is float else found


def _fits(kind: type, found: Any) -> bool:
    """May raise OverflowError or UnicodeEncodeError for a value that cannot be stored."""
    if kind is float:
        return type(found) in (int, float) and isfinite(float(found))
    if kind is int:
        return type(found) is int and -(2**63) <= found < 2**63
    if kind is str:
        return isinstance(found, str) and found.encode() is not None
    return type(found) is kind


def parse_time(name: str, found: Any) -> datetime:
    """A time from an event's value, in UTC. Raises :class:`Poison` for anything else."""
    try:
        time = found if isinstance(found, datetime) else datetime.fromisoformat(found)
        if time.tzinfo is None:
            raise ValueError("without a time zone")
        return time.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        raise Poison(
            f"{name}: {found!r:.60} is not a time with a zone, such as 2026-01-31T12:00:00Z"
        ) from None


def from_milliseconds(found: int) -> datetime:
    """A message's timestamp as a time. Raises :class:`Poison` for one that a datetime cannot hold."""
    try:
        return EPOCH + timedelta(milliseconds=found)
    except OverflowError:
        raise Poison(f"the timestamp {found} is after the year 9999") from None


def sortable(time: datetime) -> str:
    """Text of fixed length that sorts like the time."""
    return f"{(time - _BEGINNING) // _MICROSECOND:018d}"
