from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Retry, SettingsError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


def named(value: object) -> str:
    """The same in every process: without addresses."""
    return getattr(value, "__name__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def make(**settings: Any) -> App:
    return App(**{"name": "chat", "source": "chat.in", "sink": "chat.out", **settings})


async def handle(msg: Message) -> bytes:
    return bytes(msg.value)


# The settings of an app.


def test_an_app_names_its_own_topics_after_itself() -> None:
    app = make()
    assert (app.dlq, app.state, app.retry) == ("chat.dlq", "chat.state", Retry())
    app.stage(handle)
    app.check()
    assert repr(app) == "App('chat', source='chat.in', sink='chat.out', stages=['handle'])"


class Watcher:
    def started(self, message: Message, attempt: int) -> None: ...


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"name": ""}, "name='' is no topic name"),
        ({"name": "two words"}, "name='two words' is no topic name"),
        ({"name": ".."}, "is no topic name"),
        ({"name": "n" * 241}, "is too long: 240 characters at most"),
        ({"name": 5}, "name=5 is no topic name"),
        ({"source": "a/b"}, "source='a/b' is no topic name"),
        ({"source": "s" * 250}, "is no topic name: 1 to 249"),
        ({"source": None}, "source=None is no topic name"),
        ({"sink": ""}, "sink='' is no topic name"),
        ({"sink": "chat.in"}, "source and sink are both 'chat.in'"),
        ({"source": "chat.dlq"}, "are the app's own topics"),
        ({"sink": "chat.state"}, "are the app's own topics"),
        ({"decode": "yaml"}, "decode='yaml' is not known; give a function, 'json' or 'text'"),
        ({"decode": 5}, "decode must be a function, 'json' or 'text', not int"),
        ({"retry": 3}, "retry=3 is no Retry; write retry=Retry(attempts=…)"),
        ({"retry_share": 0}, "retry_share=0: needs a number above 0 and up to 1"),
        ({"retry_share": 1.5}, "retry_share=1.5: needs"),
        ({"retry_share": True}, "retry_share=True: needs"),
        ({"observer": Watcher()}, "needs the methods 'started' and 'ended'"),
        ({"capacity": 0}, "capacity=0: needs a whole number of at least 1"),
        ({"capacity": 1.5}, "capacity=1.5: needs a whole number"),
        ({"capacity": True}, "capacity=True: needs a whole number"),
        (
            {"idempotency": 600},
            "App 'chat': idempotency=600 is no Idempotency; write idempotency=Idempotency(…)",
        ),
        ({"idempotency": False}, "idempotency=False is no Idempotency"),
        ({"commit_interval": 0}, "commit_interval=0: needs a number above 0, in seconds"),
        ({"commit_interval": math.nan}, "commit_interval=nan"),
        ({"commit_interval": math.inf}, "commit_interval=inf"),
        ({"drain_timeout": -1}, "drain_timeout=-1: needs a number above 0, in seconds"),
        ({"drain_timeout": "30"}, "drain_timeout='30'"),
    ],
    ids=named,
)
def test_settings_that_cannot_work_are_refused_in_words(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make(**settings)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("decode", ["json", "text", bytes.decode, None])
def test_a_decode_is_a_name_or_a_function(decode: Any) -> None:
    assert make(decode=decode).decode == decode


# Stages.


def test_a_stage_is_declared_with_and_without_arguments_and_stays_a_function() -> None:
    app = make()

    @app.stage
    async def one(msg: Message) -> str:
        return "one"

    @app.stage()
    async def two(msg: Message) -> str:
        return "two"

    @app.stage(retry=Retry(attempts=2), timeout=1, limit=7)
    async def three(msg: Message, http: object) -> str:
        return "three"

    assert [stage.name for stage in app.stages] == ["one", "two", "three"]
    assert [stage.function for stage in app.stages] == [one, two, three]
    last = app.stages[-1]
    assert (last.retry, last.timeout, last.limit, last.resources) == (Retry(attempts=2), 1, 7, ("http",))


class AsyncHandler:
    def __init__(self) -> None:
        self.seen: list[bytes] = []

    async def __call__(self, msg: Message) -> bytes:
        return b""

    def method(self, msg: Message) -> bytes:
        return b""


class PlainHandler:
    def __call__(self, msg: Message, http: object) -> bytes:
        return b""


async def with_greeting(msg: Message, greeting: str) -> str:
    return greeting


def plain(msg: Message) -> bytes:
    return b""


@pytest.mark.parametrize(
    ("function", "name", "is_async", "resources"),
    [
        (handle, "handle", True, ()),
        (plain, "plain", False, ()),
        (AsyncHandler(), "AsyncHandler", True, ()),
        (AsyncHandler().method, "method", False, ()),
        (PlainHandler(), "PlainHandler", False, ("http",)),
        (functools.partial(with_greeting, greeting="hi"), "partial", True, ("greeting",)),
        (lambda msg: msg.value, "<lambda>", False, ()),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_anything_callable_is_a_stage_and_async_is_seen(
    function: Any, name: str, is_async: bool, resources: tuple[str, ...]
) -> None:
    app = make()
    app.stage(function)
    (stage,) = app.stages
    assert (stage.name, stage.is_async, stage.resources) == (name, is_async, resources)


def no_argument() -> None: ...


def many(msg: Message, *clients: object) -> None: ...


def anything(msg: Message, **clients: object) -> None: ...


def generator(msg: Message) -> Iterator[int]:
    yield 1


async def async_generator(msg: Message) -> AsyncIterator[int]:
    yield 1


def by_name_only(*, msg: Message) -> None: ...


def by_place_only(msg: Message, http: object, /) -> None: ...


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (no_argument, "stage 'no_argument': it takes no argument; a stage is given the message"),
        (many, "'*clients' names no resource; list the resources it takes by name"),
        (anything, "'*clients' names no resource"),
        (generator, "it is a generator; a stage returns its result instead of yielding it"),
        (async_generator, "it is a generator"),
        (by_name_only, "'msg' is keyword-only; the message comes by position"),
        (by_place_only, "'http' is positional-only; resources come by name"),
        (42, "it is not a function whose parameters can be read"),
        ("handle", "it is not a function"),
        (dict, "it is not a function"),
    ],
    ids=named,
)
def test_functions_that_cannot_be_stages_are_refused_in_words(function: Any, complaint: str) -> None:
    app = make()
    with pytest.raises(SettingsError) as caught:
        app.stage(function)
    assert complaint in str(caught.value)
    assert "App 'chat', stage " in str(caught.value)
    assert app.stages == []


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"timeout": 0}, "timeout of App 'chat', stage 'handle'=0: needs a number above 0"),
        ({"timeout": math.inf}, "needs a number above 0"),
        ({"limit": 0}, "limit of App 'chat', stage 'handle'=0: needs a whole number of at least 1"),
        ({"limit": 2.0}, "needs a whole number"),
        ({"retry": 5}, "App 'chat', stage 'handle': retry=5 is no Retry"),
    ],
    ids=named,
)
def test_settings_of_a_stage_that_cannot_work_are_refused_in_words(
    settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        make().stage(**settings)(handle)
    assert complaint in str(caught.value)


def test_a_thread_cannot_be_ended_so_a_plain_stage_takes_no_timeout() -> None:
    with pytest.raises(SettingsError, match="timeout= needs an 'async def' stage"):
        make().stage(timeout=1.0)(plain)


def test_a_stage_of_the_same_name_is_refused() -> None:
    app = make()
    app.stage(handle)
    with pytest.raises(SettingsError, match="stage 'handle': there is a stage of this name already"):
        app.stage(handle)


# Resources, and the check of the whole.


def test_resources_are_given_to_stages_and_to_later_resources_by_name() -> None:
    app = make()

    @app.resource
    def settings() -> dict[str, str]:
        return {}

    @app.resource
    async def http(settings: dict[str, str]) -> AsyncIterator[str]:
        yield "client"

    @app.stage
    async def ask(msg: Message, http: str, settings: dict[str, str]) -> str:
        return http

    app.check()
    assert list(app.resources) == ["settings", "http"]
    assert app.resources["http"].needs == ("settings",)


def test_a_resource_of_the_same_name_is_refused() -> None:
    app = make()
    app.resource(no_argument)
    with pytest.raises(
        SettingsError, match="resource 'no_argument': there is a resource of this name already"
    ):
        app.resource(no_argument)


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (many, "'*clients' names no resource"),
        (by_place_only, "'msg' is positional-only; resources come by name"),
        (42, "it is not a function"),
    ],
    ids=named,
)
def test_functions_that_cannot_be_resources_are_refused_in_words(function: Any, complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make().resource(function)
    assert complaint in str(caught.value)
    assert "App 'chat', resource " in str(caught.value)


def test_an_app_without_stages_cannot_run() -> None:
    with pytest.raises(
        SettingsError, match=r"App 'chat' has no stages: declare at least one with @app.stage"
    ):
        make().check()


def test_a_resource_that_is_not_there_is_named_with_a_near_match() -> None:
    app = make()

    @app.resource
    def database() -> str:
        return ""

    @app.stage
    async def ask(msg: Message, databse: str) -> str:
        return databse

    with pytest.raises(SettingsError, match=r"stage 'ask': it takes 'databse'.*did you mean 'database'"):
        app.check()


def test_without_a_near_match_all_resources_are_named() -> None:
    app = make()

    @app.resource
    def database() -> str:
        return ""

    @app.stage
    async def ask(msg: Message, http: str) -> str:
        return http

    with pytest.raises(SettingsError, match=r"it takes 'http'.*\(there are: database\)"):
        app.check()


def test_without_any_resource_the_way_to_declare_one_is_named() -> None:
    app = make()

    @app.stage
    async def ask(msg: Message, http: str) -> str:
        return http

    with pytest.raises(SettingsError, match=r"it takes 'http'.*declare it with @app.resource"):
        app.check()


def test_a_resource_can_only_take_those_before_it() -> None:
    app = make()

    @app.resource
    def http(settings: object) -> object:
        return settings

    @app.resource
    def settings() -> object:
        return None

    app.stage(handle)
    with pytest.raises(
        SettingsError, match=r"resource 'http': it takes 'settings', which is not .* before it"
    ):
        app.check()
