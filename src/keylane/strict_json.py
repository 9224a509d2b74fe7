"""Strict JSON for untrusted records: bounded size and depth, finite numbers, values of known types.

Anyone with write access to a topic may write anything into it. A decoder takes bytes and either returns their value or
raises :class:`MalformedRecordError`; no other exception, and in a time bounded by the record's size.
"""

from __future__ import annotations

import functools
import json
import math
import re
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from keylane.safe_text import valid

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

MAX_BYTES = 4 << 20
"""Bytes of one record; a topic's default limit is 1 MiB."""
MAX_DEPTH = 16
"""Levels of nested lists and objects; Keylane's own records have 4."""
MAX_INT = (1 << 63) - 1
MAX_TEXT_CHARACTERS = 64 << 10
"""Characters of one string."""
_SHOWN_CHARACTERS = 60
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


class MalformedRecordError(ValueError):
    """A malformed record; the message says what was expected and what was found."""


def decoder(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator for a decoder: any error that its argument causes becomes :class:`MalformedRecordError`."""

    @functools.wraps(function)
    def decode(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except MalformedRecordError:
            raise
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ) as error:
            raise MalformedRecordError(f"{type(error).__name__}: {valid(str(error), 200)}") from error

    return decode


@decoder
def loads(value: bytes | str | None, *, limit: int = MAX_BYTES) -> Any:
    """The JSON value in these bytes. Whole numbers have at most 64 bits; NaN and infinity are refused."""
    raw = value.encode() if isinstance(value, str) else value
    if not raw or len(raw) > limit:
        raise MalformedRecordError(
            f"expected 1 to {limit:,} bytes of JSON, got {len(raw) if raw is not None else 'none'}"
        )
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_deep(raw):
        raise MalformedRecordError(f"expected JSON that is at most {MAX_DEPTH} levels deep, got more")
    return json.loads(raw.decode(), parse_int=_int, parse_float=_float, parse_constant=_constant)


def _is_deep(raw: bytes) -> bool:
    """Whether the brackets are nested too deeply. Each round removes the innermost pairs."""
    brackets = _STRING.sub(b"", raw).translate(None, _NO_BRACKETS)
    for _ in range(MAX_DEPTH):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    return bool(brackets)


def _int(text: str) -> int:
    number = int(text) if len(text) <= 20 else MAX_INT + 1
    if not -MAX_INT - 1 <= number <= MAX_INT:
        raise MalformedRecordError(f"expected a number of at most 64 bits, got {text[:_SHOWN_CHARACTERS]}")
    return number


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise MalformedRecordError(f"expected a finite number, got {text[:_SHOWN_CHARACTERS]}")
    return number


def _constant(text: str) -> NoReturn:
    raise MalformedRecordError(f"expected a finite number, got {text}")


# Types of values. A boolean is not accepted as a number, nor a number as text.


def integer(found: object, least: int = 0, most: int = MAX_INT) -> int:
    """A whole number from ``least`` to ``most``."""
    if type(found) is not int or not least <= found <= most:
        raise _not(f"a whole number from {least} to {most}", found)
    return found


def number(found: object) -> float:
    """A finite number."""
    if type(found) not in (int, float):
        raise _not("a number", found)
    made = float(found)  # type: ignore[arg-type]  # checked above
    if not math.isfinite(made):
        raise _not("a finite number", found)
    return made


def seconds(found: object) -> float:
    """A unix time in seconds, in the years 1970 to 9999."""
    made = number(found)
    if not 0 <= made < 253_000_000_000:
        raise _not("seconds since 1970", found)
    return made


def text(found: object, most: int = MAX_TEXT_CHARACTERS) -> str:
    """A text of at most ``most`` characters that can be encoded."""
    if not isinstance(found, str) or len(found) > most:
        raise _not(f"a text of at most {most} characters", found)
    return valid(found)


def boolean(found: object) -> bool:
    """True or false."""
    if not isinstance(found, bool):
        raise _not("true or false", found)
    return found


def array(found: object, most: int = MAX_BYTES) -> list[Any]:
    """A list of at most ``most`` items."""
    if not isinstance(found, list) or len(found) > most:
        raise _not(f"a list of at most {most} items", found)
    return found


def row(found: object, length: int) -> list[Any]:
    """A list of exactly ``length`` items."""
    if not isinstance(found, list) or len(found) != length:
        raise _not(f"a list of {length} items", found)
    return found


def fields(found: object, *names: str) -> list[Any]:
    """The values of these names in an object; other names are ignored."""
    if not isinstance(found, dict):
        raise _not("an object", found)
    missing = [name for name in names if name not in found]
    if missing:
        raise MalformedRecordError(f"expected an object with {', '.join(names)}; {missing[0]!r} is missing")
    return [found[name] for name in names]


def _not(expected: str, found: object) -> MalformedRecordError:
    shown = repr(found) if isinstance(found, int | float | None) else type(found).__name__
    if isinstance(found, str):
        shown = f"a text of {len(found)} characters: {found[:_SHOWN_CHARACTERS]!r}"
    elif isinstance(found, list | dict):
        shown = f"{type(found).__name__} of {len(found)} items"
    return MalformedRecordError(f"expected {expected}, got {shown[: 2 * _SHOWN_CHARACTERS]}")
