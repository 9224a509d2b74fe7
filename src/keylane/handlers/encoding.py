"""Encoding of results and published values: bytes, text, or JSON.

JSON covers what a handler usually returns: dicts, lists and tuples, dataclasses, pydantic models, ``msgspec.Struct``,
``datetime``, ``date``, ``time``, ``timedelta``, ``Decimal``, ``UUID``, ``Enum`` and ``Path``. Times are ISO 8601 and a
``Decimal`` is text, as in pydantic. A set is refused, because its order is not stable.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from abc import ABCMeta
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

from keylane.result import Result

_JSON = (dict, list, tuple, str, bytes, bytearray, int, float)
_SEARCH_LEVELS_MAX = 50
"""Levels searched for the field that cannot be encoded."""


def as_bytes(value: Any) -> bytes:
    """Bytes as they are, text as UTF-8, anything else as JSON. Raises TypeError or ValueError naming type and field."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    return as_json(value)


def as_json(value: Any) -> bytes:
    """Any value as JSON, text too. Raises TypeError or ValueError naming type and field; bytes are not JSON."""
    try:
        return _dump(value).encode()
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(_explained(value, error)) from error


def refuse_type(annotation: Any) -> str | None:
    """Why no value of this type can be encoded; None if some can, or if that is unknown.

    It is unknown for a class with subclasses: a value may be one of them.
    """
    if (
        not isinstance(annotation, type)
        or annotation.__module__ == "builtins"
        or issubclass(annotation, _JSON)
        or isinstance(annotation, ABCMeta)  # protocols, too
        or annotation.__subclasses__()
        or _fields_of_type(annotation)
    ):
        return None
    from pydantic import PydanticSchemaGenerationError, TypeAdapter  # noqa: PLC0415 - a slow import

    try:
        TypeAdapter(annotation)
    except PydanticSchemaGenerationError:
        return f"{_name(annotation)} is neither bytes, text nor JSON"
    except Exception:  # unresolved names: encoding a value will tell
        return None
    return None


def _fields_of_type(kind: type) -> bool:
    return (
        dataclasses.is_dataclass(kind)
        or hasattr(kind, "__pydantic_serializer__")
        or hasattr(kind, "__struct_fields__")
    )


def _plain(value: Any) -> Any:
    """A JSON value for an object that the JSON encoder does not know. Raises TypeError or ValueError."""
    if isinstance(value, Result):
        raise TypeError("a Result is a result of its own: return or yield it, not inside of a value")
    if isinstance(value, type):
        raise TypeError(f"{_name(value)} is a class, not a value")
    if hasattr(type(value), "__pydantic_serializer__"):
        dump = getattr(value, "model_dump", None)
        if dump is not None:
            return dump(mode="json", fallback=_plain)
    elif dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(type(value), "__struct_fields__") and "msgspec" in sys.modules:
        return sys.modules["msgspec"].to_builtins(value, str_keys=True, enc_hook=_plain)
    elif isinstance(value, Enum):
        return value.value
    elif isinstance(value, UUID | Decimal | PurePath):
        return str(value)
    elif isinstance(value, date | time | timedelta):
        from pydantic_core import to_jsonable_python  # noqa: PLC0415 - a slow import

        return to_jsonable_python(value)
    raise TypeError(f"{_name(type(value))} is not JSON")


_dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_plain).encode


def _explained(value: Any, error: Exception) -> str:
    found = _culprit(value, "", 0)
    if found is None:
        return str(error)
    path, leaf = found
    what = f"{_name(type(leaf))} is not JSON"
    if isinstance(leaf, float):
        what = f"{leaf!r} is not JSON"
    elif isinstance(leaf, dict):
        what = "its keys are not text"
    elif isinstance(leaf, Result):
        what = "a Result is a result of its own: return or yield it, not inside of a value"
    elif isinstance(leaf, type):
        what = f"{_name(leaf)} is a class, not a value"
    return f"field {path!r}: {what}" if path else what


def _culprit(value: Any, path: str, depth: int) -> tuple[str, Any] | None:
    """The path and value of the innermost part that cannot be encoded."""
    if depth > _SEARCH_LEVELS_MAX or _can(value):
        return None
    for name, inner in _inside(value):
        found = _culprit(inner, path + name if path else name.removeprefix("."), depth + 1)
        if found is not None:
            return found
    return path, value


def _can(value: Any) -> bool:
    try:
        _dump(value)
    except (TypeError, ValueError):
        return False
    return True


def _inside(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f".{key}", inner) for key, inner in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"[{index}]", inner) for index, inner in enumerate(value)]
    kind = type(value)
    names: Any = ()
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif hasattr(kind, "__struct_fields__"):
        names = kind.__struct_fields__
    elif hasattr(kind, "model_fields"):
        names = list(kind.model_fields)
    return [(f".{name}", getattr(value, name, None)) for name in names]


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
