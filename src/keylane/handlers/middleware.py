"""Middleware: a function of the user's around every attempt, for tracing, auth and metrics."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from keylane.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.message import Message


class CallNext:
    """What a middleware calls to continue: the next middleware, or the stage. It returns the stage's result.

    ``stage`` is the name of the stage or handler.
    """

    __slots__ = ("_call", "stage")

    def __init__(self, stage: str, call: Callable[[Message], Awaitable[Any]]) -> None:
        self.stage = stage
        self._call = call

    def __call__(self, message: Message, /) -> Awaitable[Any]:
        """Run the rest of the attempt, with this message. Raises what the stage raises."""
        return self._call(message)


Middleware = Callable[["Message", CallNext], Awaitable[Any]]


def check_middleware(function: Callable[..., Any], where: str) -> None:
    """Raises :class:`SettingsError` for a function that cannot be a middleware."""
    expected = "expected 'async def name(msg, call_next)' that returns 'await call_next(msg)'"
    called = getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async counts
    if inspect.isasyncgenfunction(function) or inspect.isasyncgenfunction(called):
        raise SettingsError(f"{where}: {expected}, found a generator; return instead of yield")
    if not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)):
        raise SettingsError(
            f"{where}: {expected}, found no 'async def'; write one, it may wrap 'def' stages too"
        )
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{where}: {expected}, found other parameters: {error}") from None


def wrapped(
    call: Callable[[Message], Awaitable[Any]], middleware: Sequence[Middleware], stage: str
) -> Callable[[Message], Awaitable[Any]]:
    """The stage inside its middleware, the first one outermost; the stage itself when there is none."""
    for function in reversed(middleware):
        call = _around(function, CallNext(stage, call))
    return call


def _around(function: Middleware, call_next: CallNext) -> Callable[[Message], Awaitable[Any]]:
    return lambda message: function(message, call_next)
