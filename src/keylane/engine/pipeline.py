"""The app's stages, ready to be called: resources bound, time-outs, limits and threads in place."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane.core.classify import Failure, classify
from keylane.engine.batch import Batcher
from keylane.engine.gate import Gate
from keylane.errors import Poison, ResourceError
from keylane.event import as_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from keylane.app import App, Resource, Stage
    from keylane.core.classify import Rule
    from keylane.core.retry import Retry
    from keylane.message import Message
    from keylane.payload import Read

THREADS = 256
"""Threads of a ``def`` stage that has no limit of its own. They are started when needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One stage of an open pipeline."""

    name: str
    call: Callable[[Message], Awaitable[Any]]
    retry: Retry
    rules: tuple[Rule, ...]
    """How this stage's errors are classified before the usual way: its own rule, then the app's."""
    gate: Gate | None
    """Its breaker at work."""
    threads: set[int]
    """Threads that run this stage now; each adds and removes itself. Empty for an ``async def`` stage."""
    batcher: Batcher | None = None
    """Of a batch stage: it brings messages together."""


@asynccontextmanager
async def open_pipeline(app: App) -> AsyncIterator[tuple[Step, ...]]:
    """Open the app's resources, in their order, and bind them to its stages; close everything in reverse.

    Raises :class:`ResourceError` naming the resource that could not be opened or closed.
    """
    async with AsyncExitStack() as stack:
        opened: dict[str, Any] = {}
        for resource in app.resources.values():
            given = {name: opened[name] for name in resource.needs}
            opened[resource.name] = await stack.enter_async_context(_opened(app, resource, given))
        yield tuple(_step(app, stage, opened, stack) for stage in app.stages)


@asynccontextmanager
async def _opened(app: App, resource: Resource, given: dict[str, Any]) -> AsyncIterator[Any]:
    where = f"resource {resource.name!r} of app {app.name!r}"
    async with AsyncExitStack() as stack:
        try:
            if inspect.isasyncgenfunction(resource.function):
                value = await stack.enter_async_context(asynccontextmanager(resource.function)(**given))
            elif inspect.isgeneratorfunction(resource.function):
                value = stack.enter_context(contextmanager(resource.function)(**given))
            else:
                value = resource.function(**given)
                if inspect.isawaitable(value):
                    value = await value
        except Exception as error:
            raise ResourceError(f"{where} could not be opened: {type(error).__name__}: {error}") from error
        try:
            yield value
        finally:
            try:
                await stack.aclose()
            except Exception as error:
                raise ResourceError(
                    f"{where} could not be closed: {type(error).__name__}: {error}"
                ) from error


def _step(app: App, stage: Stage, opened: dict[str, Any], stack: AsyncExitStack) -> Step:
    function = stage.function
    threads: set[int] = set()
    rules = tuple(rule for rule in (stage.classify, app.classify) if rule is not None)
    gate = batcher = None
    read = None if stage.takes.payload is None else stage.takes.payload.reader()
    if stage.resources:
        function = functools.partial(function, **{name: opened[name] for name in stage.resources})
    if read is not None and stage.batching is None:
        function = _typed(function, read, stage.takes.message)
    if not stage.is_async:
        function = _threaded(stage, function, threads, stack)
    elif stage.timeout is not None:
        function = _timed(stage.name, function, stage.timeout)
    if stage.breaker is not None:
        gate = Gate(
            stage.name,
            stage.breaker,
            loop=asyncio.get_running_loop(),
            transient=lambda error: classify(error, rules).failure is Failure.TRANSIENT,
        )
    if stage.batching is not None:
        batcher = Batcher(
            stage.name,
            stage.batching,
            function,
            limit=stage.limit if stage.is_async else stage.limit or THREADS,
            retry_share=app.retry_share,
            read=read,
            table=stage.takes.table,
            gate=gate,
        )
        function = batcher.call
    else:
        if not stage.is_async:
            function = _retries_limited(function, stage.limit or THREADS, app.retry_share)
        if gate is not None:
            function = gate.guard(function)
        if stage.is_async and stage.limit is not None:
            # Around the gate: who waits here has not been let in yet.
            function = _limited(function, stage.limit, app.retry_share)
    return Step(
        name=stage.name,
        call=function,
        retry=stage.retry or app.retry,
        rules=rules,
        gate=gate,
        threads=threads,
        batcher=batcher,
    )


def _typed(function: Callable[..., Any], read: Read, message_name: str | None) -> Callable[[Message], Any]:
    """The stage with its payload, and the message by name if it asks for it."""

    def call(message: Message) -> Any:
        payload = read(message.value)
        return function(payload) if message_name is None else function(payload, **{message_name: message})

    return call


def _threaded(
    stage: Stage, function: Callable[[Any], Any], threads: set[int], stack: AsyncExitStack
) -> Callable[[Any], Awaitable[Any]]:
    # A pool per stage: threads that wait in one stage take none from another. Its size is the stage's limit.
    pool = ThreadPoolExecutor(stage.limit or THREADS, thread_name_prefix=f"stage-{stage.name}")
    stack.callback(pool.shutdown, wait=False, cancel_futures=True)
    loop = asyncio.get_running_loop()

    def guarded(given: Any) -> Any:
        me = threading.get_ident()
        threads.add(me)
        try:
            return function(given)
        except StopIteration as error:  # a future cannot carry it: it would never be done
            raise RuntimeError("the stage raised StopIteration") from error
        finally:
            threads.discard(me)

    def call(given: Any) -> Awaitable[Any]:
        return loop.run_in_executor(pool, guarded, given)

    return call


def _timed(
    name: str, function: Callable[[Any], Awaitable[Any]], timeout: float
) -> Callable[[Any], Awaitable[Any]]:
    async def call(given: Any) -> Any:
        scope = asyncio.timeout(timeout)
        try:
            async with scope:
                return await function(given)
        except TimeoutError as error:
            if scope.expired():
                raise TimeoutError(f"stage {name!r} took longer than {timeout:g} s") from error
            raise

    return call


def _limited(
    function: Callable[[Message], Awaitable[Any]], limit: int, retry_share: float
) -> Callable[[Message], Awaitable[Any]]:
    room = asyncio.Semaphore(limit)  # first come, first served

    async def call(message: Message) -> Any:
        async with room:
            return await function(message)

    return _retries_limited(call, limit, retry_share)


def _retries_limited(
    function: Callable[[Message], Awaitable[Any]], limit: int, retry_share: float
) -> Callable[[Message], Awaitable[Any]]:
    """The stage with a bound on how many of its calls are retries: what they may not take is left for first attempts.

    Also while nobody else wants it: a call that hangs until its time-out would have it when somebody does.
    """
    most = max(1, int(limit * retry_share))
    if most >= limit:
        return function
    room = asyncio.Semaphore(most)

    async def again(message: Message) -> Any:
        async with room:
            return await function(message)

    def call(message: Message) -> Awaitable[Any]:
        return again(message) if message.attempt > 1 else function(message)

    return call


def decoder(app: App) -> Callable[[bytes], Any] | None:
    """The function that turns a value's bytes into what the first stage gets, or None for the bytes themselves."""
    if app.decode == "json":
        return json.loads
    if app.decode == "text":
        return bytes.decode
    return app.decode


def encode(value: Any, stage: str) -> bytes:
    """A stage's result as bytes: see :func:`keylane.event.as_bytes`. Raises :class:`Poison` naming the stage."""
    if isinstance(value, bytes):  # the hot path
        return value
    try:
        return as_bytes(value)
    except (TypeError, ValueError) as error:
        raise Poison(
            f"stage {stage!r} returned a {type(value).__name__} that is neither bytes, nor text, nor JSON: {error}"
        ) from error
