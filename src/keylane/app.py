"""The public face: an app is a source topic, stages or handlers, and what happens when they fail."""

from __future__ import annotations

import copy
import difflib
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

from keylane.batch import Batching
from keylane.core.breaker import Breaker
from keylane.core.flood import FloodGuard
from keylane.core.ledger import Ledger
from keylane.core.retry import Retry
from keylane.core.ring import slot_of
from keylane.core.seen import Idempotency
from keylane.core.telemetry import Telemetry, topic_of
from keylane.core.versions import Versioned
from keylane.errors import SettingsError
from keylane.signature import needs_of, read_batch_signature, read_signature

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from keylane.core.classify import Rule
    from keylane.message import Message
    from keylane.signature import Signature
    from keylane.spark.query import LaneQuery

StageFunction = Callable[..., Any]
ResourceFunction = Callable[..., AsyncIterator[Any] | Iterator[Any] | Awaitable[Any] | Any]
Decode = Callable[[bytes], Any]
Reader = Callable[["Message"], Any]
"""Reads something off a message."""
F = TypeVar("F", bound=Callable[..., Any])
OnFailure = Literal["skip", "block", "block_and_dlq", "park"]
Order = Literal["key", "partition", "global", "none"]
Delivery = Literal["at_least_once", "exactly_once"]
Commit = Literal["live", "epoch"]
Unhandled = Literal["poison", "ignore"]

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")


class Observer(Protocol):
    """Told of the start and the end of every attempt, on the task's loop: it must be quick and must not raise.

    It travels to the tasks with the app, so it must be picklable. A method ``began_again``, when it has one, is called
    when a task begins again in its process after a transaction was aborted: what it did in it runs again.
    """

    def started(self, message: Message, attempt: int) -> None:
        """An attempt begins; it is the message's ``attempt``-th, over all stages."""

    def ended(self, message: Message, attempt: int, outcome: str) -> None:
        """It is over: ``ok``, ``ignored``, ``dead``; ``retry`` when there will be another, ``held``: it got nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage or handler as declared."""

    name: str
    function: StageFunction
    is_async: bool
    takes: Signature
    retry: Retry | None
    timeout: float | None
    limit: int | None
    breaker: Breaker | None
    classify: Rule | None
    types: tuple[str, ...] | None = None
    """The event types of a handler, none for the one of all others; None for a stage."""
    batching: Batching | None = None
    """Of a batch stage."""

    @property
    def resources(self) -> tuple[str, ...]:
        """The names of the resources that it is given."""
        return self.takes.resources


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What a stage or handler may be given."""

    retry: Retry | None
    breaker: Breaker | None
    timeout: float | None
    limit: int | None
    classify: Rule | None

    def check(self, where: str, *, is_async: bool) -> None:
        """Raises :class:`SettingsError` for what makes no sense."""
        _retry(where, self.retry)
        _rule(where, self.classify)
        if self.breaker is not None and not isinstance(self.breaker, Breaker):
            raise SettingsError(f"{where}: breaker={self.breaker!r} is no Breaker; write breaker=Breaker(…)")
        if self.timeout is not None:
            _more_than_zero(f"timeout of {where}", self.timeout)
            if not is_async:
                raise SettingsError(
                    f"{where}: timeout= needs an 'async def' stage, because a thread cannot be ended; "
                    "give the client it calls a time-out, or make the stage async"
                )
        if self.limit is not None:
            _at_least(f"limit of {where}", self.limit, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One resource as declared; ``needs`` are the resources it is given."""

    name: str
    function: ResourceFunction
    needs: tuple[str, ...]


class App:
    """A Keylane app. Declaring it starts nothing; :meth:`start` does.

    ``name`` is the Kafka group that holds the app's progress, and the prefix of the topics it owns: ``<name>.dlq`` for
    dead letters, ``<name>.state`` for its own state. ``source`` is read, ``sink`` is written (None: stages have effects
    of their own, what the last one returns is ignored).

    ``decode`` turns a value's bytes into what the first stage gets as ``msg.value``: a function, ``"json"`` or
    ``"text"``. A value it refuses is poison. A null value is not decoded.

    ``event_type`` says what type a message has, for apps with handlers (:meth:`on`): the name of a header
    (``event-type`` if not given), or a function that is given the message with its decoded value, such as
    :class:`keylane.Field`. ``unhandled`` is what happens to a type that no handler is declared for: ``"poison"`` (if
    not given) fails it for good, ``"ignore"`` counts it as done, with an outcome of its own.

    ``on_failure`` is what happens to a message that fails for good, and to its lane: ``"skip"`` makes it a dead letter
    and goes on, ``"block"`` stops the lane until an operator acts, ``"block_and_dlq"`` does so and archives a copy,
    ``"park"`` sends it and everything that follows it in its lane to the dead letters, to be redriven in order.
    ``retry`` says when that is; ``classify`` is asked first what kind of failure an exception is. ``retry_share`` is
    how much of a stage's ``limit``, and of the turns when more lanes are ready than can run, retries may take at
    most; the rest is left for messages that run for the first time. ``flood`` stops the app when most messages fail
    for good: an outage or a bug, not a few bad messages (None: never).
    ``idempotency`` is how far back an event that was sent twice is recognised: the second one does not run (None: it
    does). ``versions`` say that messages of a key carry versions and run in their order, whatever the order of the
    log (None: they do not).

    ``version`` is the app's own, written into dead letters. ``spool`` is the folder for dead letters that their topic
    does not take (``$KEYLANE_SPOOL``, or one in the user's state folder, if not given).

    ``delivery`` says what a crash leaves in the sink: with ``"at_least_once"`` a result may stand there twice, with
    ``"exactly_once"`` results, dead letters, lanes and progress are written in one transaction every
    ``commit_interval``, and who reads the sink ``read_committed`` finds each result once.

    ``commit`` says when progress moves: ``"live"`` while messages are done, or ``"epoch"`` when Spark has committed the
    epoch. The latter is for results that go to a Spark sink (Parquet, Delta): without ``sink=``, what the last stage
    returns is the column ``result`` of the outcomes, and after a crash the whole epoch runs again.

    ``capacity`` bounds the messages a task holds in memory, ``commit_interval`` is how often progress is written
    (seconds; 1, or 0.05 with exactly_once), ``drain_timeout`` how long the end of an epoch waits for what is running.

    ``origin_time=True`` writes the time of the first message of a chain of apps into the header ``origin-time`` of all
    results; if not given, only where the sink gives records a time of its own. Else a result's timestamp is that of its
    message, and says the same (``msg.origin_time`` reads both).

    ``ledger`` writes a record of every attempt to ``<name>.ledger``, of all keys or a share of them, for
    ``keylane verify``; in the transaction that commits the progress.

    ``telemetry`` writes a small record per task and second to ``<name>.telemetry``, for ``keylane lag`` and ``keylane
    metrics``; whatever becomes of it, the work goes on (False: none).

    Raises :class:`SettingsError` for settings that cannot work.
    """

    def __init__(
        self,
        name: str,
        *,
        source: str,
        sink: str | None = None,
        order: Order = "key",
        on_failure: OnFailure = "skip",
        delivery: Delivery = "at_least_once",
        commit: Commit = "live",
        retry: Retry | None = None,
        retry_share: float = 0.5,
        classify: Rule | None = None,
        flood: FloodGuard | None = FloodGuard(),  # noqa: B008 - frozen
        idempotency: Idempotency | None = Idempotency(),  # noqa: B008 - frozen
        versions: Versioned | None = None,
        version: str | None = None,
        spool: str | Path | None = None,
        decode: Decode | Literal["json", "text"] | None = None,
        event_type: str | Reader | None = None,
        unhandled: Unhandled | None = None,
        capacity: int = 65_536,
        commit_interval: float | None = None,
        drain_timeout: float = 30.0,
        observer: Observer | None = None,
        ledger: Ledger | None = None,
        telemetry: bool | Telemetry = True,
        origin_time: bool | None = None,
    ) -> None:
        self.name = _topic_name("name", name)
        self.source = _topic_name("source", source)
        self.sink = None if sink is None else _topic_name("sink", sink)
        if len(name) > 240:
            raise SettingsError(
                f"App name {name[:20]!r}… is too long: 240 characters at most, its topics are named after it"
            )
        if source == sink:
            raise SettingsError(
                f"App {name!r}: source and sink are both {source!r}; it would read its own results for ever"
            )
        if source in (self.dlq, self.state) or sink in (self.dlq, self.state):
            raise SettingsError(
                f"App {name!r}: {self.dlq!r} and {self.state!r} are the app's own topics, not a source or sink"
            )
        if isinstance(decode, str) and decode not in ("json", "text"):
            raise SettingsError(
                f"App {name!r}: decode={decode!r} is not known; give a function, 'json' or 'text'"
            )
        if decode is not None and not isinstance(decode, str) and not callable(decode):
            raise SettingsError(
                f"App {name!r}: decode must be a function, 'json' or 'text', not {type(decode).__name__}"
            )
        if observer is not None and not (hasattr(observer, "started") and hasattr(observer, "ended")):
            raise SettingsError(
                f"App {name!r}: observer={observer!r} needs the methods 'started' and 'ended'"
            )
        self.order = _order(name, order, on_failure)
        self.on_failure = on_failure
        self.retry = _retry(f"App {name!r}", retry) or Retry()
        if type(retry_share) not in (int, float) or not 0 < retry_share <= 1:
            raise SettingsError(
                f"App {name!r}: retry_share={retry_share!r}: needs a number above 0 and up to 1 "
                "(1: retries are like all others)"
            )
        self.retry_share = float(retry_share)
        self.classify = _rule(f"App {name!r}", classify)
        if flood is not None and not isinstance(flood, FloodGuard):
            raise SettingsError(
                f"App {name!r}: flood={flood!r} is no FloodGuard; write flood=FloodGuard(…), or None"
            )
        self.flood = flood
        if idempotency is not None and not isinstance(idempotency, Idempotency):
            raise SettingsError(
                f"App {name!r}: idempotency={idempotency!r} is no Idempotency; "
                "write idempotency=Idempotency(…), or None"
            )
        self.idempotency = idempotency
        if versions is not None and not isinstance(versions, Versioned):
            raise SettingsError(
                f"App {name!r}: versions={versions!r} is no Versioned; write versions=Versioned(…), or None"
            )
        self.versions = versions
        if version is not None and not isinstance(version, str):
            raise SettingsError(f"App {name!r}: version={version!r} is no text")
        self.version = version
        if spool is not None and not isinstance(spool, str | Path):
            raise SettingsError(f"App {name!r}: spool={spool!r} is no folder")
        self.spool = None if spool is None else Path(spool)
        self.decode = decode
        self.event_type = event_type
        if event_type is not None and not callable(event_type) and not _header_name(event_type):
            raise SettingsError(
                f"App {name!r}: event_type={event_type!r} is no header's name and no function of a message"
            )
        self.unhandled = unhandled
        if unhandled not in (None, "poison", "ignore"):
            raise SettingsError(
                f"App {name!r}: unhandled={unhandled!r} is not known; it is 'poison' or 'ignore', or declare a handler "
                "for all other types with @app.otherwise"
            )
        self.capacity = _at_least("capacity", capacity, 1)
        if delivery not in ("at_least_once", "exactly_once"):
            raise SettingsError(
                f"App {name!r}: delivery={delivery!r} is not known; it is 'at_least_once' or 'exactly_once'"
            )
        self.delivery = delivery
        if commit not in ("live", "epoch"):
            raise SettingsError(f"App {name!r}: commit={commit!r} is not known; it is 'live' or 'epoch'")
        if commit == "epoch" and (sink is not None or delivery == "exactly_once"):
            raise SettingsError(
                f"App {name!r}: commit='epoch' is for results that go to a Spark sink, in the column 'result' of the "
                "outcomes; it takes no sink= and no delivery='exactly_once'"
            )
        if commit == "epoch" and on_failure == "park":
            raise SettingsError(
                f"App {name!r}: commit='epoch' does not go with on_failure='park': a redriven lane would go on before "
                "Spark has its rows"
            )
        _refuse_versions(name, order, versions)
        if commit == "epoch" and versions is not None:
            raise SettingsError(
                f"App {name!r}: commit='epoch' does not go with versions=: a version counts when its message is done, "
                "and there nothing is before Spark has the whole epoch"
            )
        self.commit = commit
        usual = 0.05 if delivery == "exactly_once" else 1.0
        self.commit_interval = _more_than_zero(
            "commit_interval", usual if commit_interval is None else commit_interval
        )
        self.drain_timeout = _more_than_zero("drain_timeout", drain_timeout)
        self.observer = observer
        if origin_time not in (None, True, False):
            raise SettingsError(f"App {name!r}: origin_time={origin_time!r}: needs True, False or None")
        self.origin_time = origin_time
        if ledger is not None and versions is not None:
            raise SettingsError(
                f"App {name!r}: ledger= does not go with versions=: the audit knows order by offsets, and versions "
                "change places"
            )
        if ledger is not None and not isinstance(ledger, Ledger):
            raise SettingsError(
                f"App {name!r}: ledger={ledger!r} is no Ledger; write ledger=Ledger(), or Ledger(share=0.1)"
            )
        if self.ledger_topic in (source, sink):
            raise SettingsError(
                f"App {name!r}: {self.ledger_topic!r} is the app's own topic, not a source or sink"
            )
        self.ledger = ledger
        if not isinstance(telemetry, bool | Telemetry):
            raise SettingsError(
                f"App {name!r}: telemetry={telemetry!r} is not known; it is True, False or Telemetry(interval=…)"
            )
        self.telemetry = (Telemetry() if telemetry else None) if isinstance(telemetry, bool) else telemetry
        if self.telemetry_topic in (source, sink):
            raise SettingsError(
                f"App {name!r}: {self.telemetry_topic!r} is the app's own topic, not a source or sink"
            )
        self.stages: list[Stage] = []
        self.resources: dict[str, Resource] = {}
        self.hooks: dict[str, list[Callable[..., Any]]] = {}

    def with_order(self, order: Order) -> App:
        """The same app with another order, for comparison. Raises :class:`SettingsError` where it does not fit."""
        found = copy.copy(self)
        found.order = _order(self.name, order, self.on_failure)
        _refuse_versions(self.name, order, self.versions)
        return found

    def slot_of(self, key: bytes | None, offset: int) -> int:
        """The slot of a message in its partition's ring: who owns that runs it."""
        return slot_of(key if self.order == "key" else None, offset)

    @property
    def dlq(self) -> str:
        """The topic of the app's dead letters."""
        return f"{self.name}.dlq"

    @property
    def state(self) -> str:
        """The topic of the app's own state."""
        return f"{self.name}.state"

    @property
    def ledger_topic(self) -> str:
        """The topic of the app's ledger, when it keeps one."""
        return f"{self.name}.ledger"

    @property
    def telemetry_topic(self) -> str:
        """The topic of the app's telemetry, unless that is off."""
        return topic_of(self.name)

    @overload
    def stage(self, function: F, /) -> F: ...
    @overload
    def stage(
        self,
        /,
        *,
        retry: Retry | None = None,
        breaker: Breaker | None = None,
        timeout: float | None = None,
        limit: int | None = None,
        classify: Rule | None = None,
    ) -> Callable[[F], F]: ...
    def stage(
        self,
        function: F | None = None,
        /,
        *,
        retry: Retry | None = None,
        breaker: Breaker | None = None,
        timeout: float | None = None,
        limit: int | None = None,
        classify: Rule | None = None,
    ) -> F | Callable[[F], F]:
        """Declare a stage. Stages run in the order they are declared, inside the lane.

        An ``async def`` stage runs on the task's loop. A ``def`` stage runs in a thread of its own pool, so that it may
        block; ``limit`` is the size of that pool (256 if not given). ``limit`` is how many of this stage run at once
        in a task. ``timeout`` ends an attempt of an ``async def`` stage with a TimeoutError, which is retried; a
        thread cannot be ended, so a ``def`` stage takes none: give the client it calls a time-out.

        ``breaker`` opens when too many calls fail; while it is open the lanes that need this stage wait together and
        use up no attempts. ``classify`` is asked before the app's own what kind of failure an exception is.
        """
        options = _Options(retry=retry, breaker=breaker, timeout=timeout, limit=limit, classify=classify)

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
        max_size: int = 64,
        max_wait: float = 0.005,
        retry: Retry | None = None,
        breaker: Breaker | None = None,
        timeout: float | None = None,
        limit: int | None = None,
        classify: Rule | None = None,
    ) -> Callable[[F], F]: ...
    def batch_stage(
        self,
        function: F | None = None,
        /,
        *,
        max_size: int = 64,
        max_wait: float = 0.005,
        retry: Retry | None = None,
        breaker: Breaker | None = None,
        timeout: float | None = None,
        limit: int | None = None,
        classify: Rule | None = None,
    ) -> F | Callable[[F], F]:
        """Declare a stage that is given the messages of many lanes at once, never two of one: a model, a bulk call.

        It takes ``list[Message]``, a list of payloads, or a ``pyarrow.Table``, as its first parameter is annotated, and
        returns a list (or an Arrow array) with one result for each, in order. An exception in the list is the failure
        of that message alone; one that is raised is that of all, and each takes its own course. What is no list, or
        not as long, is poison for all of them.

        A batch has ``max_size`` messages at most, and its first one waits for ``max_wait`` seconds at most, unless all
        of ``limit`` batches are running: then it grows. Other options as for :meth:`stage`; ``timeout`` is for the
        whole call, and ``breaker`` counts messages: of a batch that fails, all of them.
        """
        options = _Options(retry=retry, breaker=breaker, timeout=timeout, limit=limit, classify=classify)

        def declare(function: F) -> F:
            where = f"App {self.name!r}, batch stage {_name_of(function)!r}"
            size = _at_least(f"max_size of {where}", max_size, 1)
            if type(max_wait) not in (int, float) or not 0 <= max_wait < inf:
                raise SettingsError(f"max_wait of {where}={max_wait!r}: needs a number of seconds, 0 or more")
            batching = Batching(max_size=size, max_wait=float(max_wait))
            return self._declare(function, options, types=None, batching=batching)

        return declare if function is None else declare(function)

    def on(
        self,
        *types: str,
        retry: Retry | None = None,
        breaker: Breaker | None = None,
        timeout: float | None = None,
        limit: int | None = None,
        classify: Rule | None = None,
    ) -> Callable[[F], F]:
        """Declare a handler for events of these types, instead of stages. Options as for :meth:`stage`.

        All types share the one order of their lane. Several handlers of one type run in the order they are declared;
        each is retried on its own, and those before it do not run again for it, unless the task ended in between. Each
        is given the message itself, not what the one before returned.

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
                f"App {self.name!r}: @app.on() names no event type; for all that have no handler write @app.otherwise"
            )
        if len(set(types)) < len(types):
            raise SettingsError(f"App {self.name!r}: @app.on{types!r} names a type twice")
        options = _Options(retry=retry, breaker=breaker, timeout=timeout, limit=limit, classify=classify)
        return lambda function: self._declare(function, options, types=types)

    @overload
    def otherwise(self, function: F, /) -> F: ...
    @overload
    def otherwise(
        self,
        /,
        *,
        retry: Retry | None = None,
        breaker: Breaker | None = None,
        timeout: float | None = None,
        limit: int | None = None,
        classify: Rule | None = None,
    ) -> Callable[[F], F]: ...
    def otherwise(
        self,
        function: F | None = None,
        /,
        *,
        retry: Retry | None = None,
        breaker: Breaker | None = None,
        timeout: float | None = None,
        limit: int | None = None,
        classify: Rule | None = None,
    ) -> F | Callable[[F], F]:
        """Declare the handler for events of all types that have none, and for those without a type."""
        options = _Options(retry=retry, breaker=breaker, timeout=timeout, limit=limit, classify=classify)

        def declare(function: F) -> F:
            return self._declare(function, options, types=())

        return declare if function is None else declare(function)

    def _declare(
        self,
        function: F,
        options: _Options,
        *,
        types: tuple[str, ...] | None,
        batching: Batching | None = None,
    ) -> F:
        name = _name_of(function)
        what = "handler" if types is not None else "stage" if batching is None else "batch stage"
        where = f"App {self.name!r}, {what} {name!r}"
        takes = (read_signature if batching is None else read_batch_signature)(function, where)
        options.check(where, is_async=_is_async(function))
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise SettingsError(
                f"{where}: it is a generator; a {what} returns its result instead of yielding it"
            )
        for known in self.stages:
            if known.name == name:
                raise SettingsError(f"{where}: there is a {what} of this name already")
            if (known.types is None) != (types is None):
                raise SettingsError(
                    f"{where}: app {self.name!r} has {known.name!r} already; an app has either stages (@app.stage), "
                    "which every message runs through, or handlers (@app.on), of which it runs those of its type"
                )
            if types == () == known.types:
                raise SettingsError(f"{where}: {known.name!r} is the handler of all other types already")
        self.stages.append(
            Stage(
                name=name,
                function=function,
                is_async=_is_async(function),
                takes=takes,
                retry=options.retry,
                timeout=options.timeout,
                limit=options.limit,
                breaker=options.breaker,
                classify=options.classify,
                types=types,
                batching=batching,
            )
        )
        return function

    def resource(self, function: F, /) -> F:
        """Declare a resource: a client, a pool, a model. Opened once per task, closed after its drain.

        The function is a generator that yields the resource once (``def`` or ``async def``; what follows the ``yield``
        closes it), or returns it when there is nothing to close. Stages take it by its name as a parameter, and so do
        resources that are declared after it.
        """
        name = _name_of(function)
        where = f"App {self.name!r}, resource {name!r}"
        if name in self.resources:
            raise SettingsError(f"{where}: there is a resource of this name already")
        self.resources[name] = Resource(name=name, function=function, needs=needs_of(function, where))
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
        self.hooks.setdefault(name, []).append(function)
        return function

    def check(self) -> None:
        """Raise :class:`SettingsError` when the app as declared cannot run."""
        if not self.stages:
            raise SettingsError(
                f"App {self.name!r} has no stages: declare at least one with @app.stage, or handlers with @app.on"
            )
        self._check_handlers()
        known: list[str] = []
        for resource in self.resources.values():
            for need in resource.needs:
                if need not in known:
                    raise SettingsError(
                        f"App {self.name!r}, resource {resource.name!r}: it takes {need!r}, "
                        f"which is not a resource declared before it{_near(need, known)}"
                    )
            known.append(resource.name)
        for stage in self.stages:
            for need in stage.resources:
                if need not in known:
                    what = "stage" if stage.types is None else "handler"
                    near = "; a payload comes first, before the message"
                    raise SettingsError(
                        f"App {self.name!r}, {what} {stage.name!r}: it takes {need!r}, which is not a resource of the "
                        f"app{near if need in stage.takes.misplaced else _near(need, known)}"
                    )

    @property
    def dispatches(self) -> bool:
        """Whether it has handlers instead of stages."""
        return bool(self.stages) and self.stages[0].types is not None

    def _check_handlers(self) -> None:
        where = f"App {self.name!r}"
        if not self.dispatches:
            for what, given in (("event_type", self.event_type), ("unhandled", self.unhandled)):
                if given is not None:
                    raise SettingsError(
                        f"{where}: {what}= is for apps with handlers (@app.on); it has stages"
                    )
            return
        other = [stage.name for stage in self.stages if stage.types == ()]
        if other and self.unhandled is not None:
            raise SettingsError(
                f"{where}: unhandled={self.unhandled!r}, but {other[0]!r} is the handler of all other types; "
                "leave one of them out"
            )
        if len(other) == len(self.stages):
            raise SettingsError(
                f"{where}: {other[0]!r} is the handler of all other types and there are none; "
                "make it a stage, or declare handlers with @app.on"
            )

    def outcomes(self, spark: SparkSession, **options: Any) -> DataFrame:
        """The app as a streaming DataFrame of its outcomes, for a ``writeStream`` of your own.

        Options as for :meth:`start`. The messages are processed when the query runs, once, whatever its sink does.
        """
        from keylane.spark.query import outcomes  # noqa: PLC0415 - Spark is needed only from here on

        return outcomes(self, spark, **options)

    def start(self, spark: SparkSession, **options: Any) -> LaneQuery:
        """Start the app on Spark; returns a ``StreamingQuery`` whose ``stop()`` drains first.

        Options: see :class:`keylane.spark.options.Options`. An unknown one raises :class:`SettingsError`.
        """
        from keylane.spark.query import start  # noqa: PLC0415 - Spark is needed only from here on

        return start(self, spark, **options)

    def __repr__(self) -> str:
        return f"App({self.name!r}, source={self.source!r}, sink={self.sink!r}, stages={[s.name for s in self.stages]})"


def _topic_name(what: str, name: object) -> str:
    if not isinstance(name, str) or not _TOPIC.fullmatch(name) or name in (".", ".."):
        raise SettingsError(
            f"App: {what}={name!r} is no topic name: 1 to 249 letters, digits, dots, dashes and underscores"
        )
    return name


def _at_least(what: str, number: int, least: int) -> int:
    if type(number) is not int or number < least:
        raise SettingsError(f"{what}={number!r}: needs a whole number of at least {least}")
    return number


def _more_than_zero(what: str, number: float) -> float:
    if type(number) not in (int, float) or not 0 < number < inf:
        raise SettingsError(f"{what}={number!r}: needs a number above 0, in seconds")
    return float(number)


def _retry(where: str, retry: object) -> Retry | None:
    if retry is not None and not isinstance(retry, Retry):
        raise SettingsError(f"{where}: retry={retry!r} is no Retry; write retry=Retry(attempts=…)")
    return retry


def _rule(where: str, rule: object) -> Rule | None:
    if rule is not None and not callable(rule):
        raise SettingsError(
            f"{where}: classify={rule!r} is no function; it is given an exception and answers "
            "'transient', 'poison', or None to leave it to others"
        )
    return rule


def _order(name: str, order: object, on_failure: object) -> Order:
    if order not in ("key", "partition", "global", "none"):
        raise SettingsError(f"App {name!r}: order={order!r}; needs 'key', 'partition', 'global' or 'none'")
    if on_failure not in ("skip", "block", "block_and_dlq", "park"):
        raise SettingsError(
            f"App {name!r}: on_failure={on_failure!r}; needs 'skip', 'block', 'block_and_dlq' or 'park'"
        )
    if order == "global" and on_failure == "skip":
        raise SettingsError(
            f"App {name!r}: order='global' with on_failure='skip' would let everything after a failed message run "
            "without it; choose on_failure='block' or 'block_and_dlq'"
        )
    if order != "key" and on_failure == "park":
        raise SettingsError(
            f"App {name!r}: on_failure='park' puts the lane of a key aside, and with order={order!r} keys have none; "
            "choose 'skip', 'block' or 'block_and_dlq'"
        )
    return order


def _refuse_versions(name: str, order: object, versions: Versioned | None) -> None:
    if order != "key" and versions is not None:
        raise SettingsError(
            f"App {name!r}: versions= needs order='key': with order={order!r} an entity's messages have no lane"
        )


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async counts
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _header_name(name: object) -> bool:
    return isinstance(name, str) and bool(name)


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f" (there are: {', '.join(known)})" if known else ": declare it with @app.resource"
