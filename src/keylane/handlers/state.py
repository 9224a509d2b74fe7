"""Lane state as a stage sees it: one typed value of a lane, read and changed by assignment."""

from __future__ import annotations

import difflib
import importlib
import json
import re
import typing
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from keylane.errors import Poison, SettingsError
from keylane.handlers.encoding import as_json, refuse_type
from keylane.handlers.payloads import Payload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

STATE_BYTES_MAX = 262_144
"""Size limit of a value as JSON, unless the state has another one."""
STATE_BYTES_LIMIT = 900_000
"""The largest limit that a state can have: below the usual limit of a topic's record, 1 MiB."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_SHOWN_CHARACTERS = 60
_SCALARS = (str, int, float, bool, type(None))
_MISSING: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """One state of an app: its name, the type of its values and its options. See :meth:`keylane.App.lane_state`."""

    name: str
    type: Any = Any
    """The annotation; ``Any`` takes whatever is JSON."""
    payload: Payload | None = None
    """For a dataclass, a pydantic model or a ``msgspec.Struct``."""
    adapter: tuple[Any, Any] | None = None
    """Pydantic's validator and serializer; None for ``Any`` and for a ``msgspec.Struct``."""
    ttl: float | None = None
    default: Callable[[], Any] | None = None
    migrate: Callable[[Any], Any] | None = None
    max_bytes: int = STATE_BYTES_MAX

    @property
    def shown(self) -> str:
        """The type's name."""
        return self.type.__name__ if isinstance(self.type, type) else str(self.type)

    def check(self, where: str) -> None:
        """Raises :class:`SettingsError` that names the option, what was expected and what was found."""
        name: object = self.name
        checks = (
            (isinstance(name, str) and _NAME.fullmatch(name) is not None, "name", self.name),
            (self.ttl is None or (_is_number(self.ttl) and 0 < self.ttl < inf), "ttl", self.ttl),
            (self.default is None or callable(self.default), "default", self.default),
            (self.migrate is None or callable(self.migrate), "migrate", self.migrate),
            (
                type(self.max_bytes) is int and 1 <= self.max_bytes <= STATE_BYTES_LIMIT,
                "max_bytes",
                self.max_bytes,
            ),
        )
        expected = {
            "name": "1 to 100 letters, digits, dots, dashes and underscores",
            "ttl": "seconds above 0, or None",
            "default": "a function without arguments, such as the class itself, or None",
            "migrate": "a function of the stored JSON that returns the value, or None",
            "max_bytes": f"a whole number from 1 to {STATE_BYTES_LIMIT:,}",
        }
        for fits, option, found in checks:
            if not fits:
                raise SettingsError(f"{where}: {option} must be {expected[option]}, got {found!r}")

    def typed(self, annotation: Any, where: str, names: Mapping[str, Any]) -> StateSpec:
        """The same with the type of its values. Raises :class:`SettingsError` when they cannot be JSON."""
        if annotation in (Any, object):
            return replace(self, type=Any)
        payload = Payload.of(annotation)
        if payload is not None:
            payload = payload.prepared(where, names)
            if payload.kind == "msgspec":
                return replace(self, type=annotation, payload=payload)
        why = None if payload is not None else refuse_type(annotation)
        if why is not None:
            raise SettingsError(
                f"{where}: state {self.name!r} cannot be stored: {why}. Use a dataclass, a pydantic model, a "
                "msgspec.Struct or JSON types"
            )
        try:
            pydantic: Any = importlib.import_module("pydantic")  # a slow import
            adapter = pydantic.TypeAdapter(annotation)
        except Exception as error:
            raise SettingsError(
                f"{where}: state {self.name!r} cannot be stored as {annotation!r}: {error}"
            ) from error
        return replace(
            self, type=annotation, payload=payload, adapter=(adapter.validator, adapter.serializer)
        )

    def codec(self) -> StateCodec:
        """What reads and writes its values. It is made where the app runs, because it cannot be pickled."""
        return StateCodec(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateParameter:
    """A parameter of a stage that takes a state."""

    parameter: str
    state: str
    """The state's name."""
    annotation: Any
    """The type of its values; None if the parameter does not say."""
    spec: StateSpec
    """With the type, and without the options of the state."""


class StateCodec:
    """Reads and writes the values of one state."""

    __slots__ = ("_dump", "_read", "default", "kind", "scalar", "spec")

    def __init__(self, spec: StateSpec) -> None:
        self.spec = spec
        self.kind: type[Any] | None = spec.payload.type if spec.payload is not None else None
        self._read = self._reader()
        self._dump = self._writer()
        self.default = spec.default or _default_of(spec.type)
        self.scalar = spec.type in _SCALARS

    def read(self, content: bytes, key: bytes | None) -> Any:
        """The stored value. One that does not fit goes through ``migrate``. Raises :class:`Poison` naming the field."""
        try:
            return self._read(content)
        except Poison as error:
            problem = str(error)
        spec = self.spec
        what = f"state {spec.name!r} of key {_shown(key)}"
        if spec.migrate is None:
            raise Poison(
                f"{what} does not fit {spec.shown}: {problem}. Declare how to convert it: "
                f"app.lane_state({spec.name!r}, migrate=…)"
            )
        try:
            value = spec.migrate(json.loads(content))
        except Exception as error:
            raise Poison(
                f"{what} does not fit {spec.shown}: {problem}; migrate= failed: {error!r}"
            ) from error
        self.check(value, key, "migrate= returned")
        return value

    def check(self, value: Any, key: bytes | None, what: str = "the stage set") -> None:
        """Raises :class:`Poison` for a value of another class than the state's."""
        if self.kind is not None and not isinstance(value, self.kind):
            raise Poison(
                f"state {self.spec.name!r} of key {_shown(key)} holds {self.spec.shown}; {what} "
                f"{type(value).__name__}. To remove the value, call delete()"
            )

    def write(self, value: Any, key: bytes | None) -> bytes:
        """The value as JSON. Raises :class:`Poison` when that is impossible, or too large."""
        spec = self.spec
        try:
            content = self._dump(value)
        except (TypeError, ValueError) as error:  # pydantic's and msgspec's own are among them
            raise Poison(f"state {spec.name!r} of key {_shown(key)} cannot be stored: {error}") from error
        except RecursionError:
            raise Poison(
                f"state {spec.name!r} of key {_shown(key)} cannot be stored: it contains itself"
            ) from None
        if len(content) > spec.max_bytes:
            raise Poison(
                f"state {spec.name!r} of key {_shown(key)} has {len(content):,} bytes, and its limit is "
                f"{spec.max_bytes:,}: keep less in it, or raise it with app.lane_state({spec.name!r}, max_bytes=…)"
            )
        return content

    def _reader(self) -> Callable[[bytes], Any]:
        spec = self.spec
        if spec.payload is not None:
            return spec.payload.reader()
        if spec.adapter is None:
            return json.loads
        core: Any = importlib.import_module("pydantic_core")
        validate = spec.adapter[0].validate_json

        def read(content: bytes) -> Any:
            try:
                return validate(content, strict=True)
            except core.ValidationError as error:
                first = error.errors(include_url=False, include_context=False, include_input=False)[0]
                place = ".".join(str(part) for part in first["loc"])
                raise Poison(f"{place}: {first['msg']}" if place else str(first["msg"])) from error

        return read

    def _writer(self) -> Callable[[Any], bytes]:
        spec = self.spec
        if spec.adapter is not None:
            dump = spec.adapter[1].to_json
            # By alias, because values are read by alias; an error for a field of another type than declared.
            return lambda value: dump(value, by_alias=True, round_trip=True, warnings="error")
        if spec.payload is not None:
            msgspec: Any = importlib.import_module("msgspec")
            return msgspec.json.Encoder().encode  # type: ignore[no-any-return]
        return as_json


class State(Generic[T]):
    """A value of the message's lane, by name: a parameter ``chat: State[Chat]`` of a stage or handler.

    ``value`` is what was stored, or the default when nothing is: ``T()`` where ``T`` can be called without arguments,
    otherwise None. Assign to it, or change it in place. What a failed attempt has changed is discarded. The change is
    committed together with the progress of its message.
    """

    __slots__ = ("_before", "_codec", "_content", "_deleted", "_key", "_open", "_set", "_value")

    def __init__(self, codec: StateCodec, key: bytes | None, content: bytes | None) -> None:
        self._codec = codec
        self._key = key
        self._content = content  # as stored before this attempt; None: nothing
        self._before: bytes | None = None  # the JSON of the value when it was first read
        self._value: Any = _MISSING
        self._set = False
        self._deleted = False
        self._open = True

    @property
    def name(self) -> str:
        """The state's name."""
        return self._codec.spec.name

    @property
    def exists(self) -> bool:
        """Whether there is a stored or assigned value."""
        return self._set or (self._content is not None and not self._deleted)

    @property
    def value(self) -> T:
        """The value; the default if there is none. Raises :class:`keylane.Poison` if the stored one does not fit."""
        if self._value is _MISSING:
            self._load()
        return self._value  # type: ignore[no-any-return]

    @value.setter
    def value(self, value: T) -> None:
        self.set(value)

    def get(self, default: Any = None) -> Any:
        """The value, or ``default`` if there is none."""
        return self.value if self.exists else default

    def set(self, value: T) -> None:
        """Replace the value. Raises :class:`keylane.Poison` for one of another class."""
        self._check_open()
        self._codec.check(value, self._key)
        self._value, self._set, self._deleted = value, True, False

    def delete(self) -> None:
        """Remove the value."""
        self._check_open()
        self._value, self._set, self._deleted = _MISSING, False, True

    def close(self) -> bytes | bool | None:
        """End of the attempt: the JSON to store, None to delete what is stored, or False if nothing has changed."""
        self._open = False
        if self._deleted and self._value is _MISSING:
            return False if self._content is None else None
        if self._value is _MISSING:
            return False
        codec = self._codec
        if not self._set and codec.scalar and not self._deleted:  # it cannot be changed in place
            return False
        content = codec.write(self._value, self._key)
        if self._set:
            return False if content == self._content and codec.spec.ttl is None else content
        if content == self._before:  # it was only read
            return None if self._deleted and self._content is not None else False
        return content

    def discard(self) -> None:
        """The attempt failed, or was cut off: later changes by its code are errors."""
        self._open = False

    def _load(self) -> None:
        self._check_open()
        if self._content is not None and not self._deleted:
            self._value = self._codec.read(self._content, self._key)
            self._before = self._content  # a migrated value differs from it, so it is stored in its new form
        else:
            default = self._codec.default
            self._value = None if default is None else default()
            self._before = self._codec.write(self._value, self._key)

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError(f"state {self.name!r} was used after its attempt had ended")

    def __repr__(self) -> str:
        return f"<State {self.name!r} of key {_shown(self._key)}>"


def state_annotation(annotation: Any) -> tuple[Any, str | None] | None:
    """The type of the values and the state's name, if a parameter takes a state; None for other parameters."""
    name = None
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *more = typing.get_args(annotation)
        name = next((one for one in more if isinstance(one, str)), None)
    if annotation is State:
        return Any, name
    if typing.get_origin(annotation) is State:
        return typing.get_args(annotation)[0], name
    return None


def near(name: str, known: list[str]) -> str:
    """A hint at the closest of the known names."""
    found = difflib.get_close_matches(name, known, n=1)
    if found:
        return f"; did you mean {found[0]!r}?"
    return f"; there are: {', '.join(known)}" if known else "; no stage takes a state"


def _default_of(kind: Any) -> Callable[[], Any] | None:
    """The type itself if it can be called without arguments."""
    kind = typing.get_origin(kind) or kind
    if not isinstance(kind, type) or kind in (type(None), object):
        return None
    try:
        kind()
    except Exception:  # it needs arguments
        return None
    return kind


def _shown(key: bytes | None) -> str:
    text = repr(key)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _is_number(value: object) -> bool:
    return type(value) in (int, float)
