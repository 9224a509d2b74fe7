"""A handler's result with a key, headers, topic or timestamp of its own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from keylane.event import KeyLike

    ResultHeaders = Iterable[tuple[str, str | bytes | None]] | Mapping[str, str | bytes | None]


class ResultKey(Enum):
    """What a result's key may be besides a key."""

    OF_MESSAGE = "of its message"
    """The key of the message that caused the result."""


@dataclass(frozen=True, slots=True)
class Result:
    """A value to write, and what is different from the default. A handler returns or yields it.

    ``value`` is bytes, text, or anything JSON, such as a dataclass; None is a tombstone: a record with a null value.

    ``key`` is the message's key if not given: text, bytes, a whole number or a UUID. None is a record without a key.

    ``headers`` are added to the message's headers. A name given here replaces the message's headers of that name; with
    the value None it leaves them out. ``event-id`` is derived by Keylane and cannot be given.

    ``topic`` is one of the app's ``sinks``, the first of them if not given. ``timestamp`` is in milliseconds since
    1970, the message's if not given.

    The fields are checked when the handler has returned. What cannot be written fails the message for good.
    """

    value: Any
    key: KeyLike | ResultKey | None = ResultKey.OF_MESSAGE
    headers: ResultHeaders = ()
    topic: str | None = None
    timestamp: int | None = None


class YieldedResults(list[Any]):
    """What a generator handler yielded. A list of its own type, because a list is also a JSON value."""

    __slots__ = ()
