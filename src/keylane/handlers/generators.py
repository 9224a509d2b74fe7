"""Generator handlers: what they yield, gathered when they have ended."""

from __future__ import annotations

import functools
import inspect
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any

from keylane.result import YieldedResults

if TYPE_CHECKING:
    from collections.abc import Callable


def is_generator(function: Callable[..., Any]) -> bool:
    """Whether calling it makes a generator, ``def`` or ``async def``."""
    return is_async_generator(function) or any(map(inspect.isgeneratorfunction, _callables(function)))


def is_async_generator(function: Callable[..., Any]) -> bool:
    """Whether calling it makes an async generator."""
    return any(map(inspect.isasyncgenfunction, _callables(function)))


def gathered(function: Callable[..., Any]) -> Callable[..., Any]:
    """The generator function as one that returns all it yields, as :class:`YieldedResults`.

    What is raised in between is raised, and nothing is returned.
    """
    if is_async_generator(function):

        async def collect(*given: Any, **named: Any) -> YieldedResults:
            return YieldedResults([value async for value in function(*given, **named)])

        return collect
    return lambda *given, **named: YieldedResults(function(*given, **named))


def with_entries_gathered(function: Callable[..., Any], *, is_async: bool) -> Callable[..., Any]:
    """A batch stage whose list may have generators: each becomes what it yields, or the error that it raises.

    They run where the stage runs, so one of a ``def`` stage does not block the loop.
    """
    if not is_async:
        return lambda *given, **named: _gather_entries(function(*given, **named))

    async def call(*given: Any, **named: Any) -> Any:
        returned = await function(*given, **named)
        if isinstance(returned, list | tuple) and any(type(one) is AsyncGeneratorType for one in returned):
            returned = [
                await _gather_async(one) if type(one) is AsyncGeneratorType else one for one in returned
            ]
        return _gather_entries(returned)

    return call


def _gather_entries(returned: Any) -> Any:
    if not isinstance(returned, list | tuple) or all(type(one) is not GeneratorType for one in returned):
        return returned
    return [_gather(one) if type(one) is GeneratorType else one for one in returned]


def _gather(generator: GeneratorType[Any, Any, Any]) -> YieldedResults | Exception:
    try:
        return YieldedResults(generator)
    except Exception as error:
        return error


async def _gather_async(generator: AsyncGeneratorType[Any, Any]) -> YieldedResults | Exception:
    try:
        return YieldedResults([value async for value in generator])
    except Exception as error:
        return error


def _callables(function: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """The function behind ``functools.partial``, and for an object its ``__call__``."""
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is a generator counts
    return (function,) if call is None else (function, call)
