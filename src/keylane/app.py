"""The public face: an app is a source topic, stages or handlers, and what happens when they fail."""

from __future__ import annotations

import copy
import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, overload

from keylane.errors import SettingsError
from keylane.handlers.batches import Batching
from keylane.handlers.generators import is_async_generator, is_generator
from keylane.handlers.middleware import check_middleware
from keylane.handlers.signature import needs_of, read_batch_signature, read_signature
from keylane.handlers.state import STATE_BYTES_MAX, StateSpec
from keylane.lanes.ordering import ordering
from keylane.policies.dedup_window import Idempotency
from keylane.policies.failure_guard import FailureGuard
from keylane.policies.failure_policy import failure_policy
from keylane.policies.retry import Retry
from keylane.sink import Sink
from keylane.spec import AppSpec, ResourceSpec, StageSpec
from keylane.telemetry_settings import Telemetry

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from keylane.lanes.ordering import Ordering, OrderName
    from keylane.ledger import Ledger
    from keylane.policies.breaker import Breaker
    from keylane.policies.classify import Rule
    from keylane.policies.failure_policy import FailurePolicy, OnFailure
    from keylane.policies.rate import Rate
    from keylane.policies.versions import VersionOrdering
    from keylane.spark.query import LaneQuery
    from keylane.spec import Commit, Decode, DeliveryMode, Encode, Observer, Reader, Unhandled

_TIMER = re.compile(r"[A-Za-z0-9_.-]{1,100}")
F = TypeVar("F", bound=Callable[..., Any])


class StageOptions(TypedDict, total=False):
    """The options of a stage or handler. What they mean: :meth:`App.stage`."""

    retry: Retry | None
    breaker: Breaker | None
    timeout: float | None
    max_concurrency: int | None
    classify: Rule | None
    rate: Rate | None
    per_key: Rate | None


class RunOptions(TypedDict, total=False):
    """How an app runs. What the options mean: :meth:`App.start`."""

    bootstrap: str
    starting_offsets: str
    epoch: float
    keep_alive: float
    tasks: int | Literal["auto"] | None
    shard: str | None
    outcomes: Literal["all", "failed", "none"]
    checkpoint_location: str | Path
    query_name: str
    available_now: bool
    format: str
    path: str | Path
    log_format: Literal["text", "json"]
    kafka: Mapping[str, str]


_BATCH_WAIT_SECONDS = 0.005
_STAGE_OPTIONS = ("retry", "breaker", "timeout", "max_concurrency", "classify", "rate", "per_key")


class App:
    """A Keylane app. Declaring it starts nothing; :meth:`start` does.

    ``name`` is the Kafka group that holds the app's progress, and the prefix of the topics it owns: ``<name>.dlq`` for
    dead letters, ``<name>.state`` for its own state. ``source`` is read, ``sink`` is written (None: stages have effects
    of their own, what the last one returns is ignored).

    ``sink`` may also be a :class:`keylane.Sink` of your own, which writes results elsewhere than to Kafka.

    ``sinks`` instead of ``sink`` names several topics. A :class:`keylane.Result` says which one it is for; any other
    result goes to the first.

    ``decode`` turns a value's bytes into what the first stage gets as ``msg.value``: a function, ``"json"`` or
    ``"text"``. A value it refuses is poison. A null value is not decoded.

    ``encode`` turns a result's value into bytes: a function, or one for each topic by its name. Bytes are written as
    they are. Without it text is written as UTF-8 and anything else as JSON.

    ``event_type`` says what type a message has, for apps with handlers (:meth:`on`): the name of a header
    (``event-type`` if not given), or a function that is given the message with its decoded value, such as
    :class:`keylane.Field`. ``unhandled`` is what happens to a type that no handler is declared for: ``"poison"`` (if
    not given) fails it for good, ``"ignore"`` counts it as done, with an outcome of its own.

    ``order`` says which messages wait for each other: those of a key (``"key"``), of a partition (``"partition"``), all
    (``"global"``), none (``"none"``), or those of a partition with the same header (:class:`ByHeader`) or the same
    field of the value (:class:`ByField`); any :class:`Ordering` will do.

    ``on_failure`` is what happens to a message that fails for good, and to its lane: ``"skip"`` makes it a dead letter
    and goes on, ``"block"`` stops the lane until an operator acts, ``"block_and_dlq"`` does so and archives a copy,
    ``"park"`` sends it and everything that follows it in its lane to the dead letters, to be redriven in order. A
    :class:`FailurePolicy` decides for each message.
    ``retry`` says when that is; ``classify`` is asked first what kind of failure an exception is. ``retry_share`` is
    how much of a stage's ``max_concurrency``, and of the turns when more lanes are ready than can run, retries may
    take at most; the rest is left for messages that run for the first time. ``failure_guard`` stops the app when most
    messages fail for good: an outage or a bug, not a few bad messages (None: never).
    ``idempotency`` is how far back an event that was sent twice is recognised: the second one does not run (None: it
    does). ``versions`` say that messages of a key carry versions and run in their order, whatever the order of the
    log (None: they do not).

    ``version`` is the app's own, written into dead letters. ``spool`` is the folder for dead letters that their topic
    does not take (``$KEYLANE_SPOOL``, or one in the user's state folder, if not given).

    ``delivery`` says what a crash leaves in the sink: with ``"at_least_once"`` a result may be there twice. With
    ``"exactly_once"`` results, dead letters, lanes and progress are written in one transaction every
    ``commit_interval``, and a ``read_committed`` reader of the sink sees each result once.

    ``commit`` says when progress moves: ``"live"`` while messages are done, or ``"epoch"`` when Spark has committed the
    epoch. The latter is for results that go to a Spark sink (Parquet, Delta): without ``sink=``, what the last stage
    returns is the column ``result`` of the outcomes, and after a crash the whole epoch runs again.

    ``max_buffered`` bounds the messages a task holds in memory (2 to 10,000,000), ``commit_interval`` is how often
    progress is written (seconds; 1, or 0.05 with exactly_once, at most 30 there), ``drain_timeout`` how long the
    end of an epoch waits for what is running.

    ``origin_time=True`` writes the time of the first message of a chain of apps into the header ``origin-time`` of all
    results; if not given, only where the sink gives records a time of its own. Else a result's timestamp is that of its
    message, and says the same (``msg.origin_time`` reads both).

    ``ledger`` writes a record of every attempt to ``<name>.ledger``, of all keys or a share of them, for
    ``keylane verify``; in the transaction that commits the progress.

    ``telemetry`` writes a small record per task and second to ``<name>.telemetry``, for ``keylane lag`` and ``keylane
    metrics``; problems with it never affect the work (False: none).

    Raises :class:`SettingsError` for settings that cannot work.
    """

    def __init__(
        self,
        name: str,
        *,
        source: str,
        sink: str | Sink | None = None,
        sinks: Sequence[str] = (),
        order: OrderName | Ordering = "key",
        on_failure: OnFailure | FailurePolicy = "skip",
        delivery: DeliveryMode = "at_least_once",
        commit: Commit = "live",
        retry: Retry | None = None,
        retry_share: float = 0.5,
        classify: Rule | None = None,
        failure_guard: FailureGuard | None = FailureGuard(),  # noqa: B008 - frozen
        idempotency: Idempotency | None = Idempotency(),  # noqa: B008 - frozen
        versions: VersionOrdering | None = None,
        version: str | None = None,
        spool: str | Path | None = None,
        decode: Decode | Literal["json", "text"] | None = None,
        encode: Encode | Mapping[str, Encode] | None = None,
        event_type: str | Reader | None = None,
        unhandled: Unhandled | None = None,
        max_buffered: int = 65_536,
        commit_interval: float | None = None,
        drain_timeout: float = 30.0,
        observer: Observer | None = None,
        ledger: Ledger | None = None,
        telemetry: bool | Telemetry = True,
        origin_time: bool | None = None,
    ) -> None:
        if commit_interval is None:
            commit_interval = 0.05 if delivery == "exactly_once" else 1.0
        topic = _first(name, sink, sinks)
        own_sink = sink if not isinstance(sink, str) and isinstance(sink, Sink) else None
        self._spec = AppSpec(
            name=name,
            source=source,
            sink=None if own_sink is not None else topic,  # type: ignore[arg-type]  # anything else is refused below
            sinks=tuple(sinks) or ((topic,) if isinstance(topic, str) else ()),
            custom_sink=own_sink,
            order=ordering(order) or order,  # type: ignore[arg-type]  # validated() says what is wrong with it
            on_failure=failure_policy(on_failure) or on_failure,  # type: ignore[arg-type]  # as above
            delivery=delivery,
            commit=commit,
            retry=Retry() if retry is None else retry,
            retry_share=retry_share,
            classify=classify,
            failure_guard=failure_guard,
            idempotency=idempotency,
            versions=versions,
            version=version,
            spool=Path(spool) if isinstance(spool, str) else spool,
            decode=decode,
            encode=dict(encode) if isinstance(encode, Mapping) else encode,
            event_type=event_type,
            unhandled=unhandled,
            max_buffered=max_buffered,
            commit_interval=commit_interval,
            drain_timeout=drain_timeout,
            observer=observer,
            ledger=ledger,
            telemetry=(Telemetry() if telemetry else None) if isinstance(telemetry, bool) else telemetry,
            origin_time=origin_time,
        ).validated()

    @property
    def spec(self) -> AppSpec:
        """The app as declared so far, as a frozen value."""
        return self._spec

    @property
    def name(self) -> str:
        """The app's name: its Kafka group, and the prefix of the topics it owns."""
        return self._spec.name

    @property
    def source(self) -> str:
        """The topic that it reads."""
        return self._spec.source

    @property
    def sink(self) -> str | None:
        """The topic that it writes; None when it writes none, or has a :class:`keylane.Sink` of its own."""
        return self._spec.sink

    @property
    def sinks(self) -> tuple[str, ...]:
        """The topics that it writes results to; the first one is :attr:`sink`."""
        return self._spec.sinks

    @property
    def dlq(self) -> str:
        """The topic of its dead letters."""
        return self._spec.dlq

    def with_order(self, order: OrderName | Ordering) -> App:
        """The same app with another order, for comparison. Raises :class:`SettingsError` where it does not fit."""
        found = copy.copy(self)
        found._spec = self._spec.with_order(order)  # noqa: SLF001 - its own
        return found

    @overload
    def stage(self, function: F, /) -> F: ...
    @overload
    def stage(self, /, **options: Unpack[StageOptions]) -> Callable[[F], F]: ...
    def stage(self, function: F | None = None, /, **options: Unpack[StageOptions]) -> F | Callable[[F], F]:
        """Declare a stage. Stages run in the order they are declared, inside the lane.

        An ``async def`` stage runs on the task's loop. A ``def`` stage runs in a thread of its own pool, so that it may
        block; ``max_concurrency`` is the size of that pool (256 if not given). ``max_concurrency`` is how many of this
        stage run at once in a task. ``timeout`` ends an attempt of an ``async def`` stage with a TimeoutError, which is
        retried; a thread cannot be ended, so a ``def`` stage takes none: give the client it calls a time-out.

        ``breaker`` opens when too many calls fail; while it is open the lanes that need this stage wait together and
        use up no attempts. ``classify`` is asked before the app's own what kind of failure an exception is.

        ``rate`` limits how many calls of the stage start, in the whole app; each task has the share of it that it has
        of the source's keys. ``per_key`` limits those of each key. A lane that waits for a rate uses no attempt.
        """

        def declare(function: F) -> F:
            return self._declare(function, options, types=None)

        return declare if function is None else declare(function)

    @overload
    def batch_stage(self, function: F, /) -> F: ...
    @overload
    def batch_stage(
        self,
        /,
        *,
        of: Literal["lanes", "lane"] = "lanes",
        max_size: int = 64,
        max_wait: float | None = None,
        **options: Unpack[StageOptions],
    ) -> Callable[[F], F]: ...
    def batch_stage(
        self,
        function: F | None = None,
        /,
        *,
        of: Literal["lanes", "lane"] = "lanes",
        max_size: int = 64,
        max_wait: float | None = None,
        **options: Unpack[StageOptions],
    ) -> F | Callable[[F], F]:
        """Declare a stage that is given the messages of many lanes at once, never two of one: a model, a bulk call.

        With ``of="lane"`` it is given consecutive messages of one lane instead, in order; see below.

        It takes ``list[Message]``, a list of payloads, or a ``pyarrow.Table``, as its first parameter is annotated, and
        returns a list (or an Arrow array) with one result for each, in order. An exception in the list is the failure
        of that message alone; one that is raised is that of all, and each is retried or given up on its own. Anything
        else than a list of the same length is poison for all of them.

        A batch has ``max_size`` messages at most, and its first one waits for ``max_wait`` seconds at most (0.005),
        unless all of ``max_concurrency`` batches are running: then it grows. Other options as for :meth:`stage`;
        ``timeout`` is for the whole call, and ``breaker`` counts messages: of a batch that fails, all of them.

        ``of="lane"`` is for a hot key whose calls cost the same for one message and for many. A batch is what the lane
        has when its turn comes; none waits for more. The messages pass in order. When one of them is an exception in
        the list, those behind it run again, behind its retry. When the call raises, its messages are called one by
        one. Such a stage is the app's only stage.
        """

        def declare(function: F) -> F:
            where = f"App {self.name!r}, batch stage {_name_of(function)!r}"
            if type(max_size) is not int or max_size < 1:
                raise SettingsError(
                    f"{where}: max_size must be a whole number of at least 1, got {max_size!r}"
                )
            if of not in ("lanes", "lane"):
                raise SettingsError(
                    f"{where}: of must be 'lanes' (one message of each) or 'lane' (consecutive messages of one), "
                    f"got {of!r}"
                )
            wait = _BATCH_WAIT_SECONDS if max_wait is None else max_wait
            if type(wait) not in (int, float) or not 0 <= wait < inf:
                raise SettingsError(f"{where}: max_wait must be seconds, 0 or more, got {wait!r}")
            if of == "lane" and max_wait:
                raise SettingsError(
                    f"{where}: max_wait={max_wait!r} does not fit of='lane': a batch has what its lane has, and does "
                    "not wait for more. Leave out max_wait="
                )
            batching = Batching(max_size=max_size, max_wait=float(wait), of_lane=of == "lane")
            return self._declare(function, options, types=None, batching=batching)

        return declare if function is None else declare(function)

    def on(self, *types: str, **options: Unpack[StageOptions]) -> Callable[[F], F]:
        """Declare a handler for events of these types, instead of stages. Options as for :meth:`stage`.

        All types share the one order of their lane. Several handlers of one type run in the order they are declared;
        each is retried on its own, and earlier handlers are not repeated for it, unless the task ended in the
        meantime. Each is given the message itself, not what the one before returned.

        What a handler returns, unless None, is a result. The results of a message are written together when all its
        handlers have run: of a message that fails for good there are none.
        """
        given: tuple[object, ...] = types
        for name in given:
            if not isinstance(name, str) or not name:
                raise SettingsError(
                    f"App {self.name!r}: @app.on({name!r}): needs the name of an event type; "
                    "write @app.on('OrderPaid')"
                )
        if not types:
            raise SettingsError(
                f"App {self.name!r}: @app.on() names no event type; for types without a handler write @app.on_unhandled"
            )
        if len(set(types)) < len(types):
            raise SettingsError(f"App {self.name!r}: @app.on{types!r} names a type twice")
        return lambda function: self._declare(function, options, types=types)

    @overload
    def on_unhandled(self, function: F, /) -> F: ...
    @overload
    def on_unhandled(self, /, **options: Unpack[StageOptions]) -> Callable[[F], F]: ...
    def on_unhandled(
        self, function: F | None = None, /, **options: Unpack[StageOptions]
    ) -> F | Callable[[F], F]:
        """Declare the handler for events of all types that have none, and for those without a type."""

        def declare(function: F) -> F:
            return self._declare(function, options, types=())

        return declare if function is None else declare(function)

    def on_timer(self, name: str, /, **options: Unpack[StageOptions]) -> Callable[[F], F]:
        """Declare the handler of a timer, which stages and handlers set with ``timers: Timers``.

        It runs in the timer's lane, between its messages, once the time has come and the change that set it is
        committed. Its message has the lane's key, the timer's value as ``msg.value``, and the due time as
        ``msg.timestamp``. What it returns is a result, as that of a stage or handler. Options as for :meth:`stage`; a
        handler that fails for good leaves a copy in the dead letters, whatever the app's ``on_failure``, and its lane
        continues.
        """
        given: object = name
        if not isinstance(given, str) or _TIMER.fullmatch(given) is None:
            raise SettingsError(
                f"App {self.name!r}: @app.on_timer({given!r}): expected 1 to 100 letters, digits, dots, dashes and "
                "underscores; write @app.on_timer('idle')"
            )
        if name in self._spec.timers:
            raise SettingsError(f"App {self.name!r}: timer {name!r} has a handler already")
        return lambda function: self._declare(function, options, types=None, timer=name)

    def _declare(
        self,
        function: F,
        options: StageOptions,
        *,
        types: tuple[str, ...] | None,
        batching: Batching | None = None,
        timer: str | None = None,
    ) -> F:
        name = _name_of(function)
        what = "handler" if types is not None else "stage" if batching is None else "batch stage"
        if timer is not None:
            what = "timer handler"
        where = f"App {self.name!r}, {what} {name!r}"
        for option in options:
            if option not in _STAGE_OPTIONS:
                near = difflib.get_close_matches(option, _STAGE_OPTIONS, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(_STAGE_OPTIONS)}"
                raise SettingsError(f"{where}: there is no option {option!r}; {hint}")
        takes = (read_signature if batching is None else read_batch_signature)(function, where)
        stage = StageSpec(
            name=name,
            function=function,
            is_async=_is_async(function),
            yields=is_generator(function),
            takes=takes,
            retry=options.get("retry"),
            timeout=options.get("timeout"),
            max_concurrency=options.get("max_concurrency"),
            breaker=options.get("breaker"),
            classify=options.get("classify"),
            rate=options.get("rate"),
            per_key=options.get("per_key"),
            types=types,
            batching=batching,
            timer=timer,
        )
        stage.check(where)
        if stage.yields and batching is not None:
            raise SettingsError(
                f"{where}: it is a generator; a batch stage returns a list with one entry for each message. An entry "
                "may be a generator: then what it yields are the results of that message"
            )
        for known in (*self._spec.stages, *self._spec.timers.values()):
            if known.name == name:
                raise SettingsError(f"{where}: there is a {what} of this name already")
        if timer is not None:
            self._spec = self._spec.with_timer(timer, stage)
            return function
        for known in self._spec.stages:
            if (known.types is None) != (types is None):
                raise SettingsError(
                    f"{where}: app {self.name!r} has {known.name!r} already; an app has either stages (@app.stage), "
                    "that every message passes, or handlers (@app.on) that each run for one type of message"
                )
            if known.yields and types is None:
                raise SettingsError(
                    f"{where}: the stage before it, {known.name!r}, is a generator, which must be the last stage: a "
                    "message passes each stage once. Return one value there, and yield in the last stage"
                )
            for one in (known, stage):
                if one.batching is not None and one.batching.of_lane:
                    raise SettingsError(
                        f"{where}: {one.name!r} has of='lane', so it must be the app's only stage, and there are "
                        f"{known.name!r} and {name!r}"
                    )
            if types == () == known.types:
                raise SettingsError(f"{where}: {known.name!r} is the handler of all other types already")
        self._spec = self._spec.with_stage(stage)
        return function

    def resource(self, function: F, /) -> F:
        """Declare a resource: a client, a pool, a model. Opened once per task, closed after its drain.

        The function is a generator that yields the resource once (``def`` or ``async def``; what follows the ``yield``
        closes it), or returns it when there is nothing to close. Stages take it by its name as a parameter, and so do
        resources that are declared after it.
        """
        name = _name_of(function)
        where = f"App {self.name!r}, resource {name!r}"
        if name in self._spec.resources:
            raise SettingsError(f"{where}: there is a resource of this name already")
        added = ResourceSpec(name=name, function=function, needs=needs_of(function, where))
        self._spec = self._spec.with_resources((*self._spec.resources.values(), added))
        return function

    def lane_state(
        self,
        name: str,
        /,
        *,
        ttl: float | None = None,
        default: Callable[[], Any] | None = None,
        migrate: Callable[[Any], Any] | None = None,
        max_bytes: int = STATE_BYTES_MAX,
    ) -> None:
        """Set the options of a state that stages or handlers take as ``name: State[T]``.

        ``ttl`` is the seconds after the last change until the value is removed. ``default`` makes the value of a lane
        that has none; if not given, ``T()`` where ``T`` can be called without arguments, otherwise None. ``migrate`` is
        called with the stored JSON when it does not fit ``T`` any more, and returns the value. ``max_bytes`` limits the
        value as JSON; a larger one fails its message.
        """
        spec = StateSpec(name=name, ttl=ttl, default=default, migrate=migrate, max_bytes=max_bytes)
        where = f"App {self.name!r}, state {name!r}"
        spec.check(where)
        if name in self._spec.state_options:
            raise SettingsError(f"{where}: its options are set already")
        self._spec = self._spec.with_state_options(spec)

    def middleware(self, function: F, /) -> F:
        """Declare a middleware: ``async def name(msg, call_next)`` that returns ``await call_next(msg)``.

        It runs around every attempt at every stage or handler, ``async def`` or ``def``; the first one declared is the
        outermost. In a batch stage it runs around each message on its own, and ``call_next`` returns that message's
        result. ``call_next.stage`` is the stage's name.

        It is inside of ``max_concurrency`` and the breaker, which count its errors as the stage's own, and outside of
        ``timeout``, so that it sees the stage's TimeoutError: what it awaits itself needs a time-out of its own. What
        it raises is classified as the stage's errors are; what it returns is the stage's result.
        """
        name = _name_of(function)
        check_middleware(function, f"App {self.name!r}, middleware {name!r}")
        self._spec = self._spec.with_middleware(function)
        return function

    def on_retry(self, function: F, /) -> F:
        """Called as ``(message, error, wait)`` when a message failed and will run again after ``wait`` seconds."""
        return self._hook("retry", function, 3)

    def on_dead(self, function: F, /) -> F:
        """Called as ``(message, letter)`` before a message's dead letter is written."""
        return self._hook("dead", function, 2)

    def on_block(self, function: F, /) -> F:
        """Called as ``(message, letter)`` before a lane is blocked or parked at this message."""
        return self._hook("block", function, 2)

    def on_breaker(self, function: F, /) -> F:
        """Called as ``(stage, state)`` when a stage's breaker changes; ``state`` is a ``CircuitState``."""
        return self._hook("breaker", function, 2)

    def on_hot(self, function: F, /) -> F:
        """Called as ``(hot,)`` with a :class:`HotKey` whose lane falls behind; once a minute for each key at most."""
        return self._hook("hot", function, 1)

    def _hook(self, name: str, function: F, takes: int) -> F:
        """Hooks are plain functions, called on the task's loop: quick, and what they raise changes nothing."""
        where = f"App {self.name!r}, hook on_{name}"
        if _is_async(function):
            raise SettingsError(
                f"{where}: it is 'async def'; a hook is a plain function that returns at once"
            )
        try:
            inspect.signature(function).bind(*range(takes))
        except (TypeError, ValueError) as error:
            raise SettingsError(f"{where}: it must take {takes} arguments: {error}") from None
        self._spec = self._spec.with_hook(name, function)
        return function

    def check(self) -> None:
        """Raise :class:`SettingsError` when the app as declared cannot run."""
        self._spec.check()

    def start(self, spark: SparkSession, **options: Unpack[RunOptions]) -> LaneQuery:
        """Start the app on Spark; returns a ``StreamingQuery`` whose ``stop()`` drains first.

        ``bootstrap`` is the broker's address (the environment's ``KEYLANE_BOOTSTRAP`` if not given), ``kafka`` holds
        any setting of librdkafka, for SASL, TLS and the like. ``starting_offsets`` is where to begin when the group has
        no progress yet: ``"earliest"`` (if not given), ``"latest"``, or JSON as for Spark's Kafka source:
        ``{"topic": {"0": 23, "1": -2}}`` (-2 earliest, -1 latest). ``available_now`` processes what is there now and
        ends.

        ``epoch`` is the seconds until the next epoch is planned (300); lanes keep running meanwhile. ``keep_alive`` is
        for how many seconds they do so without a Spark task (10); then they drain and are released. With 0 every epoch
        ends with a drain. ``tasks`` is how many tasks there are at most; as many as Spark has slots if not given.
        ``shard``, such as ``"3/8"``, makes this run process the third of eight shares of the partitions; other runs,
        each with a Spark application of its own, process the rest.

        ``checkpoint_location`` is Spark's checkpoint, a temporary one if not given; ``query_name`` the query's name in
        Spark, the app's if not given. ``format`` and ``path`` are the query's sink for outcome rows, as of
        ``writeStream``; ``"noop"``, if not given, drops them. ``outcomes`` is which rows the query gets: ``"all"``,
        ``"failed"`` (retried, or with a dead letter) or ``"none"``; all, but only failed ones with ``"noop"``.

        ``log_format`` is how tasks write their logs: ``"text"`` or ``"json"``, a line for every event.

        Raises :class:`SettingsError` for an option that does not exist or cannot work.
        """
        from keylane.spark.query import start  # noqa: PLC0415 - Spark is needed only from here on

        return start(self._spec, spark, **_spark_options(options))

    def outcomes(self, spark: SparkSession, **options: Unpack[RunOptions]) -> DataFrame:
        """The app as a streaming DataFrame of its outcomes, for a ``writeStream`` of your own.

        Options as for :meth:`start`. The messages are processed when the query runs, once, whatever its sink does.
        """
        from keylane.spark.query import outcomes  # noqa: PLC0415 - Spark is needed only from here on

        return outcomes(self._spec, spark, **_spark_options(options))

    def __repr__(self) -> str:
        spec = self._spec
        return f"App({spec.name!r}, source={spec.source!r}, sink={spec.sink!r}, stages={[s.name for s in spec.stages]})"


_SPARK_NAMES = {
    "bootstrap": "bootstrap",
    "starting_offsets": "startingOffsets",
    "epoch": "epoch",
    "keep_alive": "keepAlive",
    "tasks": "tasks",
    "shard": "shard",
    "outcomes": "outcomes",
    "checkpoint_location": "checkpointLocation",
    "query_name": "queryName",
    "available_now": "availableNow",
    "format": "format",
    "path": "path",
    "log_format": "logFormat",
}
"""Keyword arguments of :meth:`App.start`, and Spark's names for them."""


def _spark_options(given: RunOptions) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name == "kafka":
            options |= {f"kafka.{setting}": content for setting, content in given["kafka"].items()}
        elif name in _SPARK_NAMES:
            options[_SPARK_NAMES[name]] = value
        else:
            known = [*_SPARK_NAMES, "kafka"]
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise SettingsError(f"unknown option {name!r}: {hint}")
    return options


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async counts
    return (
        inspect.iscoroutinefunction(function)
        or inspect.iscoroutinefunction(call)
        or is_async_generator(function)
    )


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _first(name: str, sink: object, sinks: object) -> object:
    """The topic of results without a topic. Raises :class:`SettingsError` for ``sinks`` that are not topics."""
    if isinstance(sinks, str) or not isinstance(sinks, Sequence):
        raise SettingsError(
            f"App {name!r}: sinks must be a tuple of topics, such as ('items', 'invoices'), got {sinks!r}"
        )
    if sinks and sink is not None:
        raise SettingsError(
            f"App {name!r}: it has sink={sink!r} and sinks={tuple(sinks)!r}; write only sinks=, with the topic of "
            "results without a topic as the first"
        )
    return sinks[0] if sinks else sink
