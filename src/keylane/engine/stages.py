"""The app's stages, ready to be called: resources bound, time-outs, limits and threads in place."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from keylane.engine.batching import Batcher
from keylane.engine.breaker_gate import BreakerGate, BreakerOpenError
from keylane.engine.lane_batch_stage import LaneBatchStage
from keylane.engine.lane_state import StatefulCall, arguments_of
from keylane.engine.rate_gate import RateGate
from keylane.engine.results import ResultMaker
from keylane.errors import ResourceError
from keylane.handlers.generators import gathered, with_entries_gathered
from keylane.handlers.middleware import wrapped
from keylane.message import with_origin
from keylane.policies.classify import FailureKind, classify
from keylane.sink import SINK_STAGE, SinkResult

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from keylane.engine.delivery import Delivery
    from keylane.handlers.payloads import Read
    from keylane.message import Message
    from keylane.policies.classify import Rule
    from keylane.policies.retry import Retry
    from keylane.sink import Sink
    from keylane.spec import AppSpec, ResourceSpec, StageSpec

STAGE_THREADS_MAX = 256
"""Threads of a ``def`` stage that has no limit of its own. They are started when needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One stage of an open pipeline."""

    name: str
    call: Callable[[Message], Awaitable[Any]]
    retry: Retry
    rules: tuple[Rule, ...]
    """How this stage's errors are classified before the usual way: its own rule, then the app's."""
    gate: BreakerGate | None
    """Its breaker at work."""
    threads: set[int]
    """Threads that run this stage now; each adds and removes itself. Empty for an ``async def`` stage."""
    timer: str | None = None
    """Of a timer's handler: the timer's name."""
    batcher: Batcher | None = None
    """Of a batch stage: it brings messages together."""
    rate: RateGate | None = None
    """Its rate limits at work."""
    lane_batch: LaneBatchStage | None = None
    """Of a batch stage for the messages of one lane."""


@asynccontextmanager
async def open_pipeline(app: AppSpec) -> AsyncIterator[tuple[Step, ...]]:
    """Open the app's resources, in their order, and bind them to its stages; close everything in reverse.

    Raises :class:`ResourceError` naming the resource that could not be opened or closed.
    """
    async with AsyncExitStack() as stack:
        opened: dict[str, Any] = {}
        for resource in app.resources.values():
            given = {name: opened[name] for name in resource.needs}
            opened[resource.name] = await stack.enter_async_context(_opened(app, resource, given))
        steps = [_step(app, stage, opened, stack) for stage in app.stages]
        if app.custom_sink is not None:
            sink = await stack.enter_async_context(_opened_sink(app, app.custom_sink))
            steps.append(_sink_step(app, sink))
        steps += [_step(app, handler, opened, stack) for handler in app.timers.values()]
        yield tuple(steps)


@asynccontextmanager
async def _opened(app: AppSpec, resource: ResourceSpec, given: dict[str, Any]) -> AsyncIterator[Any]:
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


@asynccontextmanager
async def _opened_sink(app: AppSpec, given: Sink) -> AsyncIterator[Sink]:
    """A copy for this task: several may share a process."""
    sink = copy.copy(given)
    where = f"the sink of app {app.name!r}, {type(sink).__name__},"
    try:
        await sink.open()
    except Exception as error:
        raise ResourceError(f"{where} could not be opened: {type(error).__name__}: {error}") from error
    try:
        yield sink
    finally:
        try:
            await sink.close()
        except Exception as error:
            raise ResourceError(f"{where} could not be closed: {type(error).__name__}: {error}") from error


def _sink_step(app: AppSpec, sink: Sink) -> Step:
    """The sink as the last stage: the lane waits for its acknowledgement, and its errors are a stage's errors.

    Its message is at this stage when it is tried again, so the stages before do not run again.
    """
    last, maker = app.stages[-1].name, ResultMaker(app)

    async def write(message: Message) -> None:
        value = message.value
        if value is None:
            return
        records = value if app.dispatches else maker.records(cast("Delivery", message), value, last)
        results = [
            SinkResult(
                key=record.key,
                value=record.value,
                headers=with_origin(message, record.headers) if app.origin_time else record.headers,
                event_id=(record.headers[-1][1] or b"").decode(errors="replace"),
                timestamp=record.timestamp,
            )
            for record in records
        ]
        if results:
            await sink.write(results)

    return Step(
        name=SINK_STAGE,
        call=write,
        retry=app.retry,
        rules=() if app.classify is None else (app.classify,),
        gate=None,
        threads=set(),
    )


def _step(app: AppSpec, stage: StageSpec, opened: dict[str, Any], stack: AsyncExitStack) -> Step:
    function = stage.function
    threads: set[int] = set()
    rules = tuple(rule for rule in (stage.classify, app.classify) if rule is not None)
    gate = batcher = lane_batch = None
    read = None if stage.takes.payload is None else stage.takes.payload.reader()
    if stage.resources:
        function = functools.partial(function, **{name: opened[name] for name in stage.resources})
    if stage.batching is not None:
        if stage.takes.states:
            function = _batch_with_states(function)
    elif stage.takes.keeps_state:
        function = _with_states(function, read, stage.takes.message)
    elif read is not None:
        function = _typed(function, read, stage.takes.message)
    if stage.yields:
        function = gathered(function)
    elif stage.batching is not None:
        function = with_entries_gathered(function, is_async=stage.is_async)
    if not stage.is_async:
        function = _threaded(stage, function, threads, stack, in_context=bool(app.middleware))
    elif stage.timeout is not None:
        function = _timed(stage.name, function, stage.timeout)
    if stage.breaker is not None:
        gate = BreakerGate(
            stage.name,
            stage.breaker,
            loop=asyncio.get_running_loop(),
            transient=lambda error: classify(error, rules).failure is FailureKind.TRANSIENT,
        )
    rate = None
    if stage.rate is not None or stage.per_key is not None:
        rate = RateGate(stage.name, stage.rate, stage.per_key, loop=asyncio.get_running_loop(), breaker=gate)
    if stage.batching is not None and stage.batching.of_lane:
        lane_batch = LaneBatchStage(
            stage.name,
            function,
            max_size=stage.batching.max_size,
            limit=stage.max_concurrency if stage.is_async else stage.max_concurrency or STAGE_THREADS_MAX,
            retry_share=app.retry_share,
            read=read,
            table=stage.takes.table,
            gate=gate,
            rate=rate,
        )
    elif stage.batching is not None:
        batcher = Batcher(
            stage.name,
            stage.batching,
            function,
            limit=stage.max_concurrency if stage.is_async else stage.max_concurrency or STAGE_THREADS_MAX,
            retry_share=app.retry_share,
            read=read,
            table=stage.takes.table,
            gate=gate,
            states=[taken.parameter for taken in stage.takes.states],
        )
        function = _inside_gate(wrapped(batcher.call, app.middleware, stage.name), app, gate)
        if rate is not None:
            function = rate.guard(function)
    else:
        function = wrapped(function, app.middleware, stage.name)
        if not stage.is_async:
            function = _retries_limited(function, stage.max_concurrency or STAGE_THREADS_MAX, app.retry_share)
        if gate is not None:
            function = gate.guard(function)
        if rate is not None:
            function = rate.guard(function)
        if stage.is_async and stage.max_concurrency is not None:
            # Around the gate: who waits here has not been let in yet.
            function = _limited(function, stage.max_concurrency, app.retry_share)
    if stage.takes.keeps_state:
        function = StatefulCall(function, stage.takes.states, stage.takes.timers)
    return Step(
        name=stage.name,
        call=function,
        retry=stage.retry or app.retry,
        rules=rules,
        gate=gate,
        threads=threads,
        batcher=batcher,
        rate=rate,
        lane_batch=lane_batch,
        timer=stage.timer,
    )


def _inside_gate(
    function: Callable[[Message], Awaitable[Any]], app: AppSpec, gate: BreakerGate | None
) -> Callable[[Message], Awaitable[Any]]:
    """The batch stage with middleware that runs only when the breaker lets the message in."""
    if gate is None or not app.middleware:
        return function  # the batcher asks the gate

    async def call(message: Message) -> Any:
        if gate.shut:
            raise BreakerOpenError(gate)
        return await function(message)

    return call


def _typed(function: Callable[..., Any], read: Read, message_name: str | None) -> Callable[[Message], Any]:
    """The stage with its payload, and the message by name if it asks for it."""

    def call(message: Message) -> Any:
        payload = read(message.value)
        return function(payload) if message_name is None else function(payload, **{message_name: message})

    return call


def _with_states(
    function: Callable[..., Any], read: Read | None, message_name: str | None
) -> Callable[[Message], Any]:
    """The stage with its states; with its payload if it takes one, and the message by name if it asks for it."""

    def call(message: Message) -> Any:
        given = message if read is None else read(message.value)
        named = {} if message_name is None else {message_name: message}
        return function(given, **arguments_of(message), **named)

    return call


def _batch_with_states(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """The batch stage with lists of states, one for each message, in the messages' order."""
    return lambda given: function(given.items, **given.states)


def _threaded(
    stage: StageSpec,
    function: Callable[[Any], Any],
    threads: set[int],
    stack: AsyncExitStack,
    *,
    in_context: bool,
) -> Callable[[Any], Awaitable[Any]]:
    """The stage in a thread; ``in_context``: with the context variables of its caller, as a middleware set them."""
    # A pool per stage: threads that wait in one stage take none from another. Its size is the stage's limit.
    pool = ThreadPoolExecutor(
        stage.max_concurrency or STAGE_THREADS_MAX, thread_name_prefix=f"stage-{stage.name}"
    )
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

    def call_in_context(given: Any) -> Awaitable[Any]:
        return loop.run_in_executor(pool, copy_context().run, guarded, given)

    return call_in_context if in_context else call


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
    """The stage with a limit on how many of its calls are retries. The rest is reserved for first attempts.

    The reserve stays free even if nothing waits for it: a call that hangs until its time-out would block it later.
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


def decoder(app: AppSpec) -> Callable[[bytes], Any] | None:
    """The function that turns a value's bytes into what the first stage gets, or None for the bytes themselves."""
    if app.decode == "json":
        return json.loads
    if app.decode == "text":
        return bytes.decode
    return app.decode
