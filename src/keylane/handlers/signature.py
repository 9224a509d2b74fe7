"""Signatures of stages, handlers and resources: the message, a payload, resources by name."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import typing
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane.errors import SettingsError
from keylane.handlers.payloads import Payload
from keylane.handlers.state import StateParameter, StateSpec, state_annotation
from keylane.handlers.timers import is_timers
from keylane.message import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


_LISTS = ("Sequence", "Iterable", "Collection")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """How a stage is called: with the message, or with the payload and optionally the message by name."""

    resources: tuple[str, ...]
    payload: Payload | None
    message: str | None
    """The parameter for the message, if the first one is a payload."""
    misplaced: tuple[str, ...] = ()
    """Parameters after the message whose type is a payload class."""
    table: bool = False
    """For a batch stage: True if it takes an Arrow table, not a list of messages or payloads."""
    returns: Any = None
    """The annotation of its result; None if unknown."""
    states: tuple[StateParameter, ...] = ()
    """Parameters that take a state of the message's lane."""
    timers: str | None = None
    """The parameter that takes the lane's timers."""

    @property
    def keeps_state(self) -> bool:
        """Whether it takes states or timers."""
        return bool(self.states) or self.timers is not None


def read_signature(function: Callable[..., Any], where: str) -> Signature:
    """The signature of a stage or handler. Raises :class:`SettingsError` if it is invalid."""
    parameters = _parameters(function, where)
    if not parameters:
        raise SettingsError(f"{where}: it takes no argument; a stage is given the message")
    first, *rest = parameters
    if first.kind is first.KEYWORD_ONLY:
        raise SettingsError(f"{where}: {first.name!r} is keyword-only; the message comes by position")
    names = _names_around()
    timers, rest = _timers_of(function, rest, names, where)
    states, rest = _states_of(function, rest, names, where)
    annotation = _annotation(function, first, names)
    payload = Payload.of(annotation)
    if payload is None:
        if not _is_message(annotation):
            raise SettingsError(f"{where}: {_no_sense(first.name, annotation)}")
        misplaced = tuple(p.name for p in rest if Payload.of(_annotation(function, p, names)) is not None)
        return Signature(
            resources=_by_name(rest, where),
            payload=None,
            message=None,
            misplaced=misplaced,
            returns=_returns(function, names),
            states=states,
            timers=timers,
        )
    payload = payload.prepared(where, names)
    asks = [p.name for p in rest if _asks_for_message(function, p, names)]
    if len(asks) > 1:
        raise SettingsError(
            f"{where}: {' and '.join(map(repr, asks))} both ask for the message; one is enough"
        )
    resources = tuple(name for name in _by_name(rest, where) if name not in asks)
    return Signature(
        resources=resources,
        payload=payload,
        message=asks[0] if asks else None,
        returns=_returns(function, names),
        states=states,
        timers=timers,
    )


def read_batch_signature(function: Callable[..., Any], where: str) -> Signature:
    """The signature of a batch stage. Raises :class:`SettingsError` if it is invalid."""
    parameters = _parameters(function, where)
    if not parameters:
        raise SettingsError(f"{where}: it takes no argument; a batch stage is given a list of messages")
    first, *rest = parameters
    if first.kind is first.KEYWORD_ONLY:
        raise SettingsError(f"{where}: {first.name!r} is keyword-only; the messages come by position")
    names = _names_around()
    timers, rest = _timers_of(function, rest, names, where)
    if timers is not None:
        raise SettingsError(
            f"{where}: a batch stage takes no Timers; set timers in a stage before or after it"
        )
    states, rest = _states_of(function, rest, names, where, listed=True)
    annotation = _annotation(function, first, names)
    resources = _by_name(rest, where)
    if _is_table(annotation):
        return Signature(resources=resources, payload=None, message=None, table=True, states=states)
    item = _item_of(annotation)
    payload = Payload.of(item)
    if payload is not None:
        return Signature(
            resources=resources, payload=payload.prepared(where, names), message=None, states=states
        )
    if item is None or not _is_message(item):
        raise SettingsError(
            f"{where}: {first.name!r} is annotated with {_shown(annotation)!r}; a batch stage takes list[Message], a "
            "list of payloads (a dataclass, a msgspec.Struct or a pydantic model), or a pyarrow.Table"
        )
    return Signature(resources=resources, payload=None, message=None, states=states)


def needs_of(function: Callable[..., Any], where: str) -> tuple[str, ...]:
    """The names of the resources that a resource takes."""
    return _by_name(_parameters(function, where), where)


def _parameters(function: Callable[..., Any], where: str) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{where}: it is not a function whose parameters can be read: {error}") from None
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise SettingsError(
                f"{where}: '*{parameter.name}' names no resource; list the resources it takes by name"
            )
    return parameters


def _by_name(parameters: list[inspect.Parameter], where: str) -> tuple[str, ...]:
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise SettingsError(f"{where}: {parameter.name!r} is positional-only; resources come by name")
    return tuple(parameter.name for parameter in parameters)


def _timers_of(
    function: Callable[..., Any], parameters: list[inspect.Parameter], names: Mapping[str, Any], where: str
) -> tuple[str | None, list[inspect.Parameter]]:
    """The parameter that takes the timers, and the others."""
    found = [one for one in parameters if is_timers(_annotation(function, one, names))]
    if len(found) > 1:
        raise SettingsError(
            f"{where}: {found[0].name!r} and {found[1].name!r} both take the timers; one is enough"
        )
    if found and found[0].kind is inspect.Parameter.POSITIONAL_ONLY:
        raise SettingsError(f"{where}: {found[0].name!r} is positional-only; timers come by name")
    return (found[0].name if found else None), [one for one in parameters if one not in found]


def _states_of(
    function: Callable[..., Any],
    parameters: list[inspect.Parameter],
    names: Mapping[str, Any],
    where: str,
    *,
    listed: bool = False,
) -> tuple[tuple[StateParameter, ...], list[inspect.Parameter]]:
    """The parameters that take a state, and the others. ``listed``: a batch stage takes a list for its messages."""
    states, others = [], []
    for parameter in parameters:
        annotation = _annotation(function, parameter, names)
        if isinstance(annotation, str) and re.match(r"(list\[)?(\w+\.)?State\[", annotation):
            raise SettingsError(f"{where}: {_no_sense(parameter.name, annotation)}")
        found = state_annotation(annotation)
        inner = (
            None
            if typing.get_origin(annotation) is not list
            else state_annotation(typing.get_args(annotation)[0])
        )
        if found is None and inner is None:
            others.append(parameter)
            continue
        if listed is (inner is None):
            expected = "list[State[…]], one for each message" if listed else "State[…]"
            raise SettingsError(f"{where}: {parameter.name!r} must be annotated with {expected}")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise SettingsError(f"{where}: {parameter.name!r} is positional-only; states come by name")
        kind, name = found or inner or (Any, None)
        spec = StateSpec(name=name or parameter.name)
        spec.check(f"{where}, state {spec.name!r}")
        states.append(
            StateParameter(
                parameter=parameter.name,
                state=spec.name,
                annotation=kind,
                spec=spec.typed(kind, where, names),
            )
        )
    return tuple(states), others


def _names_around() -> Mapping[str, Any]:
    """The local names where the stage is declared, to find classes defined inside a function."""
    frame = sys._getframe(1)  # noqa: SLF001 - there is no other way to the caller's names
    while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, "keylane.app"):
        frame = frame.f_back
    return frame.f_locals


def _annotation(function: Callable[..., Any], parameter: inspect.Parameter, names: Mapping[str, Any]) -> Any:
    """The parameter's annotation; its text if it cannot be evaluated."""
    return _meaning(function, parameter.annotation, names)


def _returns(function: Callable[..., Any], names: Mapping[str, Any]) -> Any:
    """The result's annotation; None if there is none or it cannot be evaluated."""
    found = _meaning(function, inspect.signature(function).return_annotation, names)
    return None if found is inspect.Signature.empty or isinstance(found, str) else found


def _meaning(function: Callable[..., Any], found: Any, names: Mapping[str, Any]) -> Any:
    """An annotation's value; its text if it cannot be evaluated."""
    if not isinstance(found, str):
        return found
    while isinstance(function, functools.partial):
        function = function.func
    plain: Any = inspect.unwrap(function)
    if not hasattr(plain, "__globals__"):
        plain = getattr(plain, "__func__", None) or type(plain).__call__
    try:
        return eval(found, getattr(plain, "__globals__", {}), dict(names))  # noqa: S307 - the app's own annotation
    except Exception:  # imported for type checkers only, or not at all
        return found


def _is_table(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation in ("Table", "pa.Table", "pyarrow.Table")
    return (
        isinstance(annotation, type)
        and annotation.__name__ == "Table"
        and annotation.__module__.partition(".")[0] == "pyarrow"
    )


def _item_of(annotation: Any) -> Any:
    """The item type of a list annotation; None for other annotations."""
    if annotation in (inspect.Parameter.empty, Any, object, list, Sequence, Iterable, Collection):
        return Any
    if isinstance(annotation, str):
        container, _, inner = annotation.removesuffix("]").partition("[")
        return inner if container.rpartition(".")[2] in ("list", "List", *_LISTS) and inner else None
    if typing.get_origin(annotation) in (list, Sequence, Iterable, Collection):
        return typing.get_args(annotation)[0]
    return None


def _is_message(annotation: Any) -> bool:
    if annotation in (inspect.Parameter.empty, Any, object) or isinstance(annotation, typing.TypeVar):
        return True
    if isinstance(annotation, str):
        return annotation.partition("[")[0].rpartition(".")[2] == "Message"
    annotation = typing.get_origin(annotation) or annotation  # Message[Order]
    if not isinstance(annotation, type):
        return False
    return issubclass(annotation, Message) or bool(getattr(annotation, "_is_protocol", False))


def _asks_for_message(
    function: Callable[..., Any], parameter: inspect.Parameter, names: Mapping[str, Any]
) -> bool:
    annotation = _annotation(function, parameter, names)
    if annotation is inspect.Parameter.empty:
        return parameter.name in ("msg", "message")
    annotation = typing.get_origin(annotation) or annotation
    return (isinstance(annotation, type) and issubclass(annotation, Message)) or (
        isinstance(annotation, str) and _is_message(annotation)
    )


def _no_sense(name: str, annotation: Any) -> str:
    if isinstance(annotation, str):
        return (
            f"the type {annotation!r} of {name!r} is not known where the app is built; import it there, "
            "not under 'if TYPE_CHECKING'"
        )
    return (
        f"{name!r} is annotated with {_shown(annotation)!r}; the first parameter is the message (keylane.Message), or "
        "its payload: a dataclass, a msgspec.Struct or a pydantic model"
    )


def _shown(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    return getattr(annotation, "__name__", None) or repr(annotation)
