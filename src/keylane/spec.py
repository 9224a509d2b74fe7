"""An app's settings, stages and resources as frozen values: all of an app that the layers below see.

:class:`keylane.App` makes it and checks it once; nothing changes it afterwards.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from keylane.errors import SettingsError
from keylane.handlers.encoding import refuse_type
from keylane.handlers.state import near
from keylane.lanes.ordering import Ordering, ordering
from keylane.ledger import Ledger
from keylane.offsets.slots import slot_of
from keylane.policies.breaker import Breaker
from keylane.policies.dedup_window import Idempotency
from keylane.policies.failure_guard import FailureGuard
from keylane.policies.failure_policy import FailurePolicy
from keylane.policies.rate import Rate
from keylane.policies.retry import Retry
from keylane.policies.versions import VersionOrdering
from keylane.result import Result
from keylane.telemetry_settings import Telemetry
from keylane.topic_names import AppTopicNames

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from keylane.handlers.batches import Batching
    from keylane.handlers.middleware import Middleware
    from keylane.handlers.signature import Signature
    from keylane.handlers.state import StateSpec
    from keylane.lanes.ordering import OrderName
    from keylane.message import Message
    from keylane.policies.classify import Rule
    from keylane.sink import Sink

StageFunction = Callable[..., Any]
ResourceFunction = Callable[..., AsyncIterator[Any] | Iterator[Any] | Awaitable[Any] | Any]
Decode = Callable[[bytes], Any]
Encode = Callable[[Any], bytes | None]
Reader = Callable[["Message"], Any]
"""Reads something off a message."""
DeliveryMode = Literal["at_least_once", "exactly_once"]
Commit = Literal["live", "epoch"]
Unhandled = Literal["poison", "ignore"]

COMMIT_INTERVAL_SECONDS_MAX = 30.0
"""Seconds, with ``exactly_once``. A transaction lasts 60: what is left is for large progress, and for the commit."""

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_NAME_CHARACTERS_MAX = 240
_BUFFERED_MESSAGES_LIMIT = 10_000_000


_COMPUTED = ("states", "keeps_state")
"""Properties of an app that are computed again where it is unpickled."""


class Observer(Protocol):
    """Called at the start and the end of every attempt, on the task's loop: it must be quick and must not raise.

    It travels to the tasks with the app, so it must be picklable. A method ``began_again``, when it has one, is called
    when a task begins again in its process after a transaction was aborted: messages of that transaction run again.
    """

    def started(self, message: Message, attempt: int) -> None:
        """An attempt begins; it is the message's ``attempt``-th, over all stages."""

    def ended(self, message: Message, attempt: int, outcome: str) -> None:
        """It is over: ``ok``, ``ignored``, ``dead``; ``retry`` when there will be another, ``held``: it got nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage or handler as declared."""

    name: str
    function: StageFunction
    is_async: bool
    takes: Signature
    retry: Retry | None
    timeout: float | None
    max_concurrency: int | None
    breaker: Breaker | None
    classify: Rule | None
    types: tuple[str, ...] | None = None
    """The event types of a handler, none for the one of all others; None for a stage."""
    batching: Batching | None = None
    """Of a batch stage."""
    timer: str | None = None
    """Of a timer's handler: the timer's name."""
    rate: Rate | None = None
    per_key: Rate | None = None
    yields: bool = False
    """Whether it is a generator, which yields its results."""

    @property
    def resources(self) -> tuple[str, ...]:
        """The names of the resources that it takes."""
        return self.takes.resources

    def check(self, where: str) -> None:
        """Raises :class:`SettingsError` that names the option, what was expected and what was found."""
        _expect(where, _STAGE_CHECKS, self)
        if self.timeout is not None and not self.is_async:
            raise SettingsError(
                f"{where}: timeout= needs an 'async def' stage, because a thread cannot be ended; "
                "give the client it calls a time-out, or make the stage async"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceSpec:
    """One resource as declared; ``needs`` are the resources it takes."""

    name: str
    function: ResourceFunction
    needs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AppSpec(AppTopicNames):
    """An app as declared so far. What each setting means: :class:`keylane.App`.

    :meth:`validated` looks at the settings, :meth:`check` at the stages, handlers and resources.
    """

    name: str
    source: str
    sink: str | None
    order: Ordering
    on_failure: FailurePolicy
    delivery: DeliveryMode
    commit: Commit
    retry: Retry
    retry_share: float
    classify: Rule | None
    failure_guard: FailureGuard | None
    idempotency: Idempotency | None
    versions: VersionOrdering | None
    version: str | None
    spool: Path | None
    decode: Decode | Literal["json", "text"] | None
    event_type: str | Reader | None
    unhandled: Unhandled | None
    max_buffered: int
    commit_interval: float
    drain_timeout: float
    observer: Observer | None
    ledger: Ledger | None
    telemetry: Telemetry | None
    origin_time: bool | None
    stages: tuple[StageSpec, ...] = ()
    resources: Mapping[str, ResourceSpec] = field(default_factory=dict)
    hooks: Mapping[str, tuple[Callable[..., Any], ...]] = field(default_factory=dict)
    middleware: tuple[Middleware, ...] = ()
    """Around every attempt, the first one outermost."""
    timers: Mapping[str, StageSpec] = field(default_factory=dict)
    """The handlers of timers, by the timers' names."""
    state_options: Mapping[str, StateSpec] = field(default_factory=dict)
    """Options of states, by name."""
    custom_sink: Sink | None = None
    """Where results go that are not written to Kafka; then ``sink`` is None."""
    sinks: tuple[str, ...] = ()
    """All topics that results are written to; ``sink`` is the first."""
    encode: Encode | Mapping[str, Encode] | None = None
    """Makes bytes of a result's value: for all topics, or by topic."""

    def validated(self) -> AppSpec:
        """The same, when its settings can work together. Raises :class:`SettingsError` that names what cannot."""
        for what in ("name", "source", "sink"):
            given = getattr(self, what)
            if not _is_topic_name(given) and not (what == "sink" and given is None):
                raise SettingsError(
                    f"App: {what} must be 1 to 249 letters, digits, dots, dashes and underscores, got {given!r}"
                )
        where = f"App {self.name!r}"
        if self.custom_sink is not None and isinstance(self.custom_sink, type):
            name = self.custom_sink.__name__
            raise SettingsError(
                f"{where}: sink must be an object, found the class {name}; write sink={name}(…)"
            )
        for sink in self.sinks:
            if not _is_topic_name(sink):
                raise SettingsError(
                    f"{where}: each of sinks must be 1 to 249 letters, digits, dots, dashes and underscores, "
                    f"got {sink!r}"
                )
        if len(set(self.sinks)) < len(self.sinks):
            raise SettingsError(f"{where}: sinks={self.sinks!r} names a topic twice")
        if len(self.name) > _NAME_CHARACTERS_MAX:
            raise SettingsError(
                f"App {self.name[:20]!r}… is too long: {_NAME_CHARACTERS_MAX} characters at most, "
                "its topics are named after it"
            )
        _expect(where, _APP_CHECKS, self)
        self._check_topics(where)
        self._check_encode(where)
        for wrong, why in self._contradictions():
            if wrong:
                raise SettingsError(f"{where}: {why}")
        return self

    def _check_topics(self, where: str) -> None:
        if self.source in self.sinks:
            raise SettingsError(
                f"{where}: source and sink are both {self.source!r}; it would read its own results endlessly"
            )
        for own in (self.dlq, self.state, self.lane_state, self.ledger_topic, self.telemetry_topic):
            if own in (self.source, *self.sinks):
                raise SettingsError(f"{where}: {own!r} is the app's own topic, not a source or sink")

    def _check_encode(self, where: str) -> None:
        if isinstance(self.encode, Mapping):
            for topic, function in self.encode.items():
                if topic not in self.sinks:
                    known = ", ".join(map(repr, self.sinks)) or "none"
                    raise SettingsError(
                        f"{where}: encode= has a function for {topic!r}, which is not a sink; sinks: {known}"
                    )
                if not callable(function):
                    raise SettingsError(f"{where}: encode[{topic!r}] must be a function, got {function!r}")
        elif self.encode is not None and not callable(self.encode):
            raise SettingsError(
                f"{where}: encode must be a function that makes bytes of a result's value, a dict of such functions by "
                f"topic, or None, got {self.encode!r}"
            )

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        """Settings that do not work together: whether they are given, and why not."""
        by_epoch = self.commit == "epoch"
        unfit = self.order.why_not(self.on_failure)
        yield unfit is not None, unfit or ""
        yield (
            not self.order.by_key and self.versions is not None,
            f"versions= needs order='key': with order={self.order!r} an entity's messages have no lane",
        )
        yield (
            self.order.reads_messages and self.ledger is not None,
            f"ledger= does not work with order={self.order!r}: the audit knows lanes by keys",
        )
        yield (
            self.order.reads_messages and (self.order.splittable or self.order.by_key),
            (
                f"order={self.order!r} reads messages, so its lanes are not keys: splittable and by_key must be False, "
                "else two tasks would run one lane"
            ),
        )
        yield (
            by_epoch and (self.sink is not None or self.delivery == "exactly_once"),
            (
                "commit='epoch' is for results that go to a Spark sink, in the column 'result' of the outcomes; "
                "it takes no sink= and no delivery='exactly_once'"
            ),
        )
        own_sink = (
            f"sink={type(self.custom_sink).__name__}(…) is not written in a Kafka transaction or by Spark"
        )
        yield (
            self.custom_sink is not None and self.delivery == "exactly_once",
            (
                f"{own_sink}, so delivery='exactly_once' cannot hold; choose 'at_least_once', and let the sink "
                "recognise repeats by SinkResult.event_id"
            ),
        )
        yield (
            self.custom_sink is not None and by_epoch,
            f"{own_sink}, so commit='epoch' does not fit; choose commit='live'",
        )
        yield (
            by_epoch and self.on_failure.parks,
            (
                f"commit='epoch' does not work with on_failure={self.on_failure!r}: a redriven lane would continue "
                "before Spark has its rows"
            ),
        )
        yield (
            by_epoch and self.versions is not None,
            (
                "commit='epoch' does not work with versions=: a version counts when its message is done, and there "
                "nothing is done before Spark has the whole epoch"
            ),
        )
        yield (
            self.delivery == "exactly_once" and self.commit_interval > COMMIT_INTERVAL_SECONDS_MAX,
            (
                f"commit_interval must be at most {COMMIT_INTERVAL_SECONDS_MAX:g} seconds "
                f"with delivery='exactly_once', got {self.commit_interval:g}: the broker ends a transaction after 60"
            ),
        )
        yield (
            self.ledger is not None and self.versions is not None,
            "ledger= does not work with versions=: the audit knows order by offsets, and versions change places",
        )

    def with_order(self, order: OrderName | Ordering) -> AppSpec:
        """The same app with another order, for comparison. Raises :class:`SettingsError` where it does not fit."""
        return replace(self, order=ordering(order) or order).validated()  # type: ignore[arg-type]  # it says what is wrong

    def with_stage(self, stage: StageSpec) -> AppSpec:
        """The same app with one stage or handler more."""
        return replace(self, stages=(*self.stages, stage))

    def with_resources(self, resources: Iterable[ResourceSpec]) -> AppSpec:
        """The same app with these resources, in this order, instead of its own."""
        return replace(self, resources=MappingProxyType({one.name: one for one in resources}))

    def with_hook(self, name: str, function: Callable[..., Any]) -> AppSpec:
        """The same app with one hook more."""
        functions = (*self.hooks.get(name, ()), function)
        return replace(self, hooks=MappingProxyType({**self.hooks, name: functions}))

    def with_middleware(self, function: Middleware) -> AppSpec:
        """The same app with one middleware more, inside those before it."""
        return replace(self, middleware=(*self.middleware, function))

    def __getstate__(self) -> dict[str, Any]:
        """Read-only views of dicts cannot be pickled; the dicts can."""
        return {
            **{name: value for name, value in self.__dict__.items() if name not in _COMPUTED},
            "resources": dict(self.resources),
            "hooks": dict(self.hooks),
            "state_options": dict(self.state_options),
            "timers": dict(self.timers),
        }

    def slot_of(self, key: bytes | None, offset: int) -> int:
        """The slot of a message in its partition's ring: its owner runs the message."""
        # A partition that is not splittable is whole, except for ranges left from a time when its order was "key".
        return slot_of(key if self.order.has_lanes else None, offset)

    @cached_property
    def states(self) -> Mapping[str, StateSpec]:
        """The states that its stages and handlers take, by name. Raises :class:`SettingsError` if two types differ."""
        found: dict[str, StateSpec] = {}
        for stage in (*self.stages, *self.timers.values()):
            for taken in stage.takes.states:
                known = found.get(taken.state)
                if (
                    known is not None
                    and taken.spec.type != known.type
                    and Any not in (known.type, taken.spec.type)
                ):
                    raise SettingsError(
                        f"App {self.name!r}, stage {stage.name!r}: state {taken.state!r} is {taken.spec.shown}, and "
                        f"another stage takes it as {known.shown}; a name has one type"
                    )
                if known is None or known.type is Any:
                    found[taken.state] = taken.spec
        for name, spec in found.items():
            if (options := self.state_options.get(name)) is not None:
                found[name] = replace(
                    spec,
                    ttl=options.ttl,
                    default=options.default,
                    migrate=options.migrate,
                    max_bytes=options.max_bytes,
                )
        return MappingProxyType(found)

    @cached_property
    def keeps_state(self) -> bool:
        """Whether its stages or handlers take states or timers."""
        return bool(self.timers) or any(stage.takes.keeps_state for stage in self.stages)

    def with_timer(self, timer: str, handler: StageSpec) -> AppSpec:
        """The same app with one handler of a timer more."""
        return replace(self, timers=MappingProxyType({**self.timers, timer: handler}))

    def with_state_options(self, options: StateSpec) -> AppSpec:
        """The same app with the options of one state."""
        return replace(self, state_options=MappingProxyType({**self.state_options, options.name: options}))

    @property
    def moves_ranges(self) -> bool:
        """Whether its ranges can move between workers one by one.

        Versions and lane state are restored for all ranges together, and lanes over partitions have no ranges.
        """
        return self.versions is None and not self.keeps_state and self.order.max_tasks is None

    @property
    def dispatches(self) -> bool:
        """Whether it has handlers instead of stages."""
        return bool(self.stages) and self.stages[0].types is not None

    def check(self) -> None:
        """Raise :class:`SettingsError` when the app as declared cannot run."""
        if not self.stages:
            raise SettingsError(
                f"App {self.name!r} has no stages: declare at least one with @app.stage, or handlers with @app.on"
            )
        self._check_handlers()
        self._check_results()
        self._check_states()
        self._check_lane_batches()
        known: list[str] = []
        for resource in self.resources.values():
            for need in resource.needs:
                if need not in known:
                    raise SettingsError(
                        f"App {self.name!r}, resource {resource.name!r}: it takes {need!r}, "
                        f"which is not a resource declared before it{_near(need, known)}"
                    )
            known.append(resource.name)
        for stage in (*self.stages, *self.timers.values()):
            for need in stage.resources:
                if need not in known:
                    what = "stage" if stage.types is None else "handler"
                    near = "; a payload comes first, before the message"
                    raise SettingsError(
                        f"App {self.name!r}, {what} {stage.name!r}: it takes {need!r}, which is not a resource of the "
                        f"app{near if need in stage.takes.misplaced else _near(need, known)}"
                    )

    def _check_results(self) -> None:
        """What the last stage returns is written: a type that never can be is refused before it has any effect."""
        if self.sink is None and self.custom_sink is None and self.commit != "epoch":
            return
        for stage in () if self.dispatches else self.stages[:-1]:
            if stage.takes.returns is Result:
                raise SettingsError(
                    f"App {self.name!r}, stage {stage.name!r}: it returns a Result, and {self.stages[-1].name!r} comes "
                    "after it. Only the last stage writes results: return the value that the next stage needs"
                )
        for stage in self.stages if self.dispatches else self.stages[-1:]:
            if self.encode is not None:  # it knows types that JSON does not
                continue
            why = refuse_type(stage.takes.returns)
            if why is not None:
                raise SettingsError(
                    f"App {self.name!r}, stage {stage.name!r}: its result cannot be written: {why}. Return bytes, "
                    "text, a dict, a dataclass, a pydantic model or a msgspec.Struct"
                )

    def _check_states(self) -> None:
        where, states = f"App {self.name!r}", self.states
        for name in self.state_options:
            if name not in states:
                raise SettingsError(f"{where}: no stage takes the state {name!r}{near(name, list(states))}")
        if self.keeps_state and not self.order.has_lanes:
            raise SettingsError(
                f"{where}: a state or timer belongs to a lane, and with order={self.order!r} there are none"
            )
        if self.keeps_state and self.commit == "epoch":
            raise SettingsError(
                f"{where}: commit='epoch' does not work with states and timers: a state changes when its message is "
                "done, and there nothing is done before Spark has the whole epoch"
            )

    def _check_lane_batches(self) -> None:
        for stage in self.stages:
            if stage.batching is None or not stage.batching.of_lane:
                continue
            for what, given in (
                ("versions=", self.versions is not None),
                ("middleware", bool(self.middleware)),
                ("a State", stage.takes.keeps_state),
            ):
                if given:
                    raise SettingsError(
                        f"App {self.name!r}, batch stage {stage.name!r}: of='lane' does not work with {what}, which is "
                        "about one message at a time; use of='lanes'"
                    )

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


_Check = tuple[str, Callable[[Any], bool], str]
"""A setting, whether a value fits, and what fits, in words."""


def _expect(where: str, checks: Sequence[_Check], given: object) -> None:
    """Raises :class:`SettingsError` for the first setting that does not fit."""
    for name, fits, expected in checks:
        value = getattr(given, name)
        if not fits(value):
            raise SettingsError(f"{where}: {name} must be {expected}, got {value!r}")


def _one_of(*names: str | None) -> Callable[[Any], bool]:
    return lambda value: (value is None or isinstance(value, str)) and value in names


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def _maybe(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _is_count(least: int, most: float = inf) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _is_number(above: float, most: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and above < value <= most and value < inf


def _is_topic_name(name: object) -> bool:
    return isinstance(name, str) and _TOPIC.fullmatch(name) is not None and name not in (".", "..")


_RULE = "a function that takes an exception and returns 'transient', 'poison', or None to leave it to others"
_SECONDS = _is_number(0, inf)

_STAGE_CHECKS: tuple[_Check, ...] = (
    ("retry", _maybe(_is(Retry)), "a Retry, such as Retry(attempts=3), or None"),
    ("classify", _maybe(callable), _RULE),
    ("breaker", _maybe(_is(Breaker)), "a Breaker or None"),
    ("timeout", _maybe(_SECONDS), "seconds above 0, or None"),
    ("max_concurrency", _maybe(_is_count(1)), "a whole number of at least 1, or None"),
    ("rate", _maybe(_is(Rate)), "a Rate, such as Rate(100) or Rate(1000, per=60), or None"),
    ("per_key", _maybe(_is(Rate)), "a Rate, such as Rate(5) or Rate(10, per=60), or None"),
)
_APP_CHECKS: tuple[_Check, ...] = (
    (
        "decode",
        lambda value: value in (None, "json", "text") or (callable(value) and not isinstance(value, str)),
        "a function, 'json', 'text' or None",
    ),
    (
        "observer",
        _maybe(lambda value: hasattr(value, "started") and hasattr(value, "ended")),
        "an object with the methods 'started' and 'ended', or None",
    ),
    (
        "order",
        _is(Ordering),
        "'key', 'partition', 'global' or 'none', or an Ordering such as ByHeader('tenant')",
    ),
    ("on_failure", _is(FailurePolicy), "'skip', 'block', 'block_and_dlq' or 'park', or a FailurePolicy"),
    ("retry", _is(Retry), "a Retry, such as Retry(attempts=3), or None"),
    ("retry_share", _is_number(0, 1), "a number above 0 and up to 1 (1: retries are like all others)"),
    ("classify", _maybe(callable), _RULE),
    ("failure_guard", _maybe(_is(FailureGuard)), "a FailureGuard or None"),
    ("idempotency", _maybe(_is(Idempotency)), "an Idempotency or None"),
    ("versions", _maybe(_is(VersionOrdering)), "a VersionOrdering or None"),
    ("version", _maybe(_is(str)), "text or None"),
    ("spool", _maybe(_is(str, Path)), "a folder or None"),
    (
        "event_type",
        _maybe(lambda value: callable(value) or (isinstance(value, str) and bool(value))),
        "the name of a header, a function of a message, or None",
    ),
    (
        "unhandled",
        _one_of("poison", "ignore", None),
        "'poison' or 'ignore'; or declare a handler for all other types with @app.on_unhandled",
    ),
    (
        "max_buffered",
        _is_count(2, _BUFFERED_MESSAGES_LIMIT),
        f"a whole number from 2 to {_BUFFERED_MESSAGES_LIMIT:,}",
    ),
    ("delivery", _one_of("at_least_once", "exactly_once"), "'at_least_once' or 'exactly_once'"),
    ("commit", _one_of("live", "epoch"), "'live' or 'epoch'"),
    ("commit_interval", _SECONDS, "seconds above 0"),
    ("drain_timeout", _SECONDS, "seconds above 0"),
    ("origin_time", _is(bool, type(None)), "True, False or None"),
    ("ledger", _maybe(_is(Ledger)), "a Ledger, such as Ledger() or Ledger(share=0.1), or None"),
    ("telemetry", _maybe(_is(Telemetry)), "True, False or a Telemetry, such as Telemetry(interval=5)"),
)


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f" (there are: {', '.join(known)})" if known else ": declare it with @app.resource"
