"""Typed payloads: a value decoded from JSON and validated as the class of a stage's or handler's first parameter.

A plain dataclass is validated by pydantic in strict mode: text is not accepted as a number. A pydantic model and a
``msgspec.Struct`` are validated by their own library with their own settings. Neither library is imported here unless
such a class is used.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from keylane.errors import Poison, SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind = Literal["dataclass", "msgspec", "pydantic"]
Read: TypeAlias = Callable[[Any], Any]

_VIOLATIONS_SHOWN = 3
"""Violations of a value that its dead letter lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The class of a payload, and the library that validates it."""

    type: type[Any]
    kind: Kind
    validator: Any = None
    """Pydantic's validator, created where the class is declared: its module may be missing on a worker."""

    @classmethod
    def of(cls, annotation: object) -> Payload | None:
        """The payload of this annotation; None if it is not a payload class."""
        if not isinstance(annotation, type):
            return None
        if _derives(annotation, "msgspec", "Struct"):
            return cls(type=annotation, kind="msgspec")
        if _derives(annotation, "pydantic", "BaseModel") or hasattr(annotation, "__pydantic_validator__"):
            return cls(type=annotation, kind="pydantic")
        return cls(type=annotation, kind="dataclass") if dataclasses.is_dataclass(annotation) else None

    def prepared(self, where: str, names: Mapping[str, Any]) -> Payload:
        """The payload with its validator, for use here and on the workers. Raises :class:`SettingsError`."""
        try:
            if self.kind == "msgspec":
                _struct_reader(self.type)
                return self
            if self.kind == "dataclass":
                _resolve(self.type, names, set())
            pydantic: Any = importlib.import_module("pydantic")  # a slow import
            return replace(self, validator=pydantic.TypeAdapter(self.type).validator)
        except Exception as error:
            raise SettingsError(
                f"{where}: the payload {self.type.__name__!r} cannot be decoded: {error}. The types of its fields "
                "must be importable where it is declared, not under 'if TYPE_CHECKING'"
            ) from error

    def reader(self) -> Read:
        """A function from a message's value to the payload: bytes and text are JSON, other values are converted.

        The function raises :class:`Poison` that names the field.
        """
        read = _struct_reader(self.type) if self.kind == "msgspec" else _pydantic_reader(self)
        own, name = self.type, self.type.__name__

        def checked(value: Any) -> Any:
            if isinstance(value, own):
                return value
            if value is None:
                raise Poison(f"no {name}: the value is null")
            return read(value)

        return checked


def _derives(found: type[Any], module: str, name: str) -> bool:
    """Whether it is a class of that library, which then is already imported."""
    base = getattr(sys.modules.get(module), name, None)
    return isinstance(base, type) and issubclass(found, base)


def _struct_reader(struct: type[Any]) -> Read:
    msgspec: Any = importlib.import_module("msgspec")
    decode = msgspec.json.Decoder(struct).decode

    def read(value: Any) -> Any:
        try:
            return (
                decode(value)
                if isinstance(value, bytes | str)
                else msgspec.convert(value, struct, strict=True)
            )
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Poison(f"no {struct.__name__}: {error}") from error

    return read


def _pydantic_reader(payload: Payload) -> Read:
    core: Any = importlib.import_module("pydantic_core")
    validator = payload.validator
    strict = True if payload.kind == "dataclass" else None  # None: the model's own setting

    def read(value: Any) -> Any:
        try:
            if isinstance(value, bytes | str):
                return validator.validate_json(value, strict=strict)
            if strict:  # strict mode for Python objects refuses a dict for a dataclass, and text for a time
                return validator.validate_json(core.to_json(value), strict=True)
            return validator.validate_python(value)
        except core.ValidationError as error:
            raise Poison(f"no {payload.type.__name__}: {_violations(error)}") from error

    return read


def _violations(error: Any) -> str:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    told = []
    for one in found[:_VIOLATIONS_SHOWN]:
        place = ".".join(str(part) for part in one["loc"])
        told.append(f"{place}: {one['msg']}" if place else str(one["msg"]))
    more = len(found) - _VIOLATIONS_SHOWN
    return "; ".join(told) + (f"; and {more} more" if more > 0 else "")


def _resolve(found: type[Any], names: Mapping[str, Any], seen: set[type[Any]]) -> None:
    """Replace the names of a dataclass's field types by the types: pydantic does not see names local to a function."""
    if found in seen:
        return
    seen.add(found)
    hints = typing.get_type_hints(found, localns=dict(names), include_extras=True)
    for field in dataclasses.fields(found):
        field.type = hints[field.name]
    for hint in hints.values():
        _resolve_inside(hint, names, seen)


def _resolve_inside(hint: Any, names: Mapping[str, Any], seen: set[type[Any]]) -> None:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        _resolve(hint, names, seen)
    for part in typing.get_args(hint):
        _resolve_inside(part, names, seen)
