"""The public face: an app is a source topic, stages, and what happens when they fail."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

from keylane.core.breaker import Breaker
from keylane.core.flood import FloodGuard
from keylane.core.ledger import Ledger
from keylane.core.retry import Retry
from keylane.core.ring import slot_of
from keylane.core.seen import Idempotency
from keylane.errors import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from keylane.core.classify import Rule
    from keylane.message import Message
    from keylane.spark.query import LaneQuery

StageFunction = Callable[..., Any]
ResourceFunction = Callable[..., AsyncIterator[Any] | Iterator[Any] | Awaitable[Any] | Any]
Decode = Callable[[bytes], Any]
F = TypeVar("F", bound=Callable[..., Any])
OnFailure = Literal["skip", "block", "block_and_dlq", "park"]
Order = Literal["key", "partition", "global", "none"]
Delivery = Literal["at_least_once", "exactly_once"]
Commit = Literal["live", "epoch"]

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")


class Observer(Protocol):
    """Told of the start and the end of every attempt, on the task's loop: it must be quick and must not raise.

    It travels to the tasks with the app, so it must be picklable. A method ``began_again``, when it has one, is called
    when a task begins again in its process after a transaction was aborted: what it did in it runs again.
    """

    def started(self, message: Message, attempt: int) -> None:
        """An attempt begins; it is the message's ``attempt``-th, over all stages."""

    def ended(self, message: Message, attempt: int, outcome: str) -> None:
        """It is over: ``ok``, ``dead``, ``retry`` when there will be another, ``held`` when it got nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage as declared."""

    name: str
    function: StageFunction
    is_async: bool
    resources: tuple[str, ...]
    retry: Retry | None
    timeout: float | None
    limit: int | None
    breaker: Breaker | None
    classify: Rule | None


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

    ``on_failure`` is what happens to a message that fails for good, and to its lane: ``"skip"`` makes it a dead letter
    and goes on, ``"block"`` stops the lane until an operator acts, ``"block_and_dlq"`` does so and archives a copy,
    ``"park"`` sends it and everything that follows it in its lane to the dead letters, to be redriven in order.
    ``retry`` says when that is; ``classify`` is asked first what kind of failure an exception is. ``retry_share`` is
    how much of a stage's ``limit``, and of the turns when more lanes are ready than can run, retries may take at
    most; the rest is left for messages that run for the first time. ``flood`` stops the app when most messages fail
    for good: an outage or a bug, not a few bad messages (None: never).
    ``idempotency`` is how far back an event that was sent twice is recognised: the second one does not run (None: it
    does). ``version`` is the app's own, written into dead letters. ``spool`` is the folder for dead letters that their
    topic does not take (``$KEYLANE_SPOOL``, or one in the user's state folder, if not given).

    ``delivery`` says what a crash leaves in the sink: with ``"at_least_once"`` a result may stand there twice, with
    ``"exactly_once"`` results, dead letters, lanes and progress are written in one transaction every
    ``commit_interval``, and who reads the sink ``read_committed`` finds each result once.

    ``commit`` says when progress moves: ``"live"`` while messages are done, or ``"epoch"`` when Spark has committed the
    epoch. The latter is for results that go to a Spark sink (Parquet, Delta): without ``sink=``, what the last stage
    returns is the column ``result`` of the outcomes, and after a crash the whole epoch runs again.

    ``capacity`` bounds the messages a task holds in memory, ``commit_interval`` is how often progress is written
    (seconds; 1, or 0.05 with exactly_once), ``drain_timeout`` how long the end of an epoch waits for what is running.

    ``ledger`` writes a record of every attempt to ``<name>.ledger``, of all keys or a share of them, for
    ``keylane verify``; in the transaction that commits the progress.

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
        version: str | None = None,
        spool: str | Path | None = None,
        decode: Decode | Literal["json", "text"] | None = None,
        capacity: int = 65_536,
        commit_interval: float | None = None,
        drain_timeout: float = 30.0,
        observer: Observer | None = None,
        ledger: Ledger | None = None,
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
        if version is not None and not isinstance(version, str):
            raise SettingsError(f"App {name!r}: version={version!r} is no text")
        self.version = version
        if spool is not None and not isinstance(spool, str | Path):
            raise SettingsError(f"App {name!r}: spool={spool!r} is no folder")
        self.spool = None if spool is None else Path(spool)
        self.decode = decode
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
        self.commit = commit
        usual = 0.05 if delivery == "exactly_once" else 1.0
        self.commit_interval = _more_than_zero(
            "commit_interval", usual if commit_interval is None else commit_interval
        )
        self.drain_timeout = _more_than_zero("drain_timeout", drain_timeout)
        self.observer = observer
        if ledger is not None and not isinstance(ledger, Ledger):
            raise SettingsError(
                f"App {name!r}: ledger={ledger!r} is no Ledger; write ledger=Ledger(), or Ledger(share=0.1)"
            )
        if self.ledger_topic in (source, sink):
            raise SettingsError(
                f"App {name!r}: {self.ledger_topic!r} is the app's own topic, not a source or sink"
            )
        self.ledger = ledger
        self.stages: list[Stage] = []
        self.resources: dict[str, Resource] = {}
        self.hooks: dict[str, list[Callable[..., Any]]] = {}

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

        def declare(function: F) -> F:
            name = getattr(function, "__name__", type(function).__name__)
            where = f"App {self.name!r}, stage {name!r}"
            parameters = _parameters(function, where, stage=True)
            if not parameters:
                raise SettingsError(f"{where}: it takes no argument; a stage is given the message")
            _retry(where, retry)
            _rule(where, classify)
            if breaker is not None and not isinstance(breaker, Breaker):
                raise SettingsError(f"{where}: breaker={breaker!r} is no Breaker; write breaker=Breaker(…)")
            if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
                raise SettingsError(
                    f"{where}: it is a generator; a stage returns its result instead of yielding it"
                )
            is_async = _is_async(function)
            if timeout is not None:
                _more_than_zero(f"timeout of {where}", timeout)
                if not is_async:
                    raise SettingsError(
                        f"{where}: timeout= needs an 'async def' stage, because a thread cannot be ended; "
                        "give the client it calls a time-out, or make the stage async"
                    )
            if limit is not None:
                _at_least(f"limit of {where}", limit, 1)
            if any(known.name == name for known in self.stages):
                raise SettingsError(f"{where}: there is a stage of this name already")
            self.stages.append(
                Stage(
                    name=name,
                    function=function,
                    is_async=is_async,
                    resources=parameters[1:],
                    retry=retry,
                    timeout=timeout,
                    limit=limit,
                    breaker=breaker,
                    classify=classify,
                )
            )
            return function

        return declare if function is None else declare(function)

    def resource(self, function: F, /) -> F:
        """Declare a resource: a client, a pool, a model. Opened once per task, closed after its drain.

        The function is a generator that yields the resource once (``def`` or ``async def``; what follows the ``yield``
        closes it), or returns it when there is nothing to close. Stages take it by its name as a parameter, and so do
        resources that are declared after it.
        """
        name = getattr(function, "__name__", type(function).__name__)
        where = f"App {self.name!r}, resource {name!r}"
        if name in self.resources:
            raise SettingsError(f"{where}: there is a resource of this name already")
        self.resources[name] = Resource(name=name, function=function, needs=_parameters(function, where))
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
            raise SettingsError(f"App {self.name!r} has no stages: declare at least one with @app.stage")
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
                    raise SettingsError(
                        f"App {self.name!r}, stage {stage.name!r}: it takes {need!r}, "
                        f"which is not a resource of the app{_near(need, known)}"
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


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async counts
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _parameters(function: Callable[..., Any], where: str, *, stage: bool = False) -> tuple[str, ...]:
    """Names of what it takes. A stage's first is given by position, as the message; the rest by name, as resources."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{where}: it is not a function whose parameters can be read: {error}") from None
    for place, parameter in enumerate(parameters):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise SettingsError(
                f"{where}: '*{parameter.name}' names no resource; list the resources it takes by name"
            )
        if stage and place == 0:
            if parameter.kind is parameter.KEYWORD_ONLY:
                raise SettingsError(
                    f"{where}: {parameter.name!r} is keyword-only; the message comes by position"
                )
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise SettingsError(f"{where}: {parameter.name!r} is positional-only; resources come by name")
    return tuple(parameter.name for parameter in parameters)


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f" (there are: {', '.join(known)})" if known else ": declare it with @app.resource"
