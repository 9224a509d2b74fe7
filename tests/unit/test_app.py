from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Retry, SettingsError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


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
    assert (app.dlq, app.spec.state, app.spec.retry) == ("chat.dlq", "chat.state", Retry())
    app.stage(handle)
    app.check()
    assert repr(app) == "App('chat', source='chat.in', sink='chat.out', stages=['handle'])"


class Watcher:
    def started(self, message: Message, attempt: int) -> None: ...


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"name": ""}, "name must be 1 to 249 letters, digits, dots, dashes and underscores, got ''"),
        ({"name": "two words"}, "got 'two words'"),
        ({"name": ".."}, "got '..'"),
        ({"name": "n" * 241}, "is too long: 240 characters at most"),
        ({"name": 5}, "got 5"),
        ({"source": "a/b"}, "source must be 1 to 249 letters"),
        ({"source": "s" * 250}, "must be 1 to 249 letters"),
        ({"source": None}, "got None"),
        ({"sink": ""}, "sink must be 1 to 249"),
        ({"sink": "chat.in"}, "source and sink are both 'chat.in'"),
        ({"source": "chat.dlq"}, "is the app's own topic"),
        ({"sink": "chat.state"}, "is the app's own topic"),
        ({"decode": "yaml"}, "decode must be a function, 'json', 'text' or None, got 'yaml'"),
        ({"decode": 5}, "decode must be a function, 'json', 'text' or None, got 5"),
        ({"retry": 3}, "retry must be a Retry, such as Retry(attempts=3), or None, got 3"),
        ({"retry_share": 0}, "retry_share must be a number above 0 and up to 1"),
        ({"retry_share": 1.5}, "got 1.5"),
        ({"retry_share": True}, "got True"),
        ({"observer": Watcher()}, "must be an object with the methods 'started' and 'ended'"),
        ({"max_buffered": 1}, "max_buffered must be a whole number from 2 to 10,000,000, got 1"),
        ({"max_buffered": 10**9}, "got 1000000000"),
        ({"max_buffered": 1.5}, "got 1.5"),
        ({"max_buffered": True}, "got True"),
        (
            {"idempotency": 600},
            "App 'chat': idempotency must be an Idempotency or None, got 600",
        ),
        ({"idempotency": False}, "got False"),
        ({"commit_interval": 0}, "commit_interval must be seconds above 0, got 0"),
        ({"commit_interval": math.nan}, "got nan"),
        ({"commit_interval": math.inf}, "got inf"),
        ({"commit_interval": 31, "delivery": "exactly_once"}, "must be at most 30 seconds"),
        ({"drain_timeout": -1}, "drain_timeout must be seconds above 0, got -1"),
        ({"drain_timeout": "30"}, "got '30'"),
    ],
    ids=named,
)
def test_error_explains_settings_that_cannot_work(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make(**settings)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("decode", ["json", "text", bytes.decode, None])
def test_a_decode_is_a_name_or_a_function(decode: Any) -> None:
    assert make(decode=decode).spec.decode == decode


# Stages.


def test_stage_decorator_returns_the_function() -> None:
    app = make()

    @app.stage
    async def one(msg: Message) -> str:
        return "one"

    @app.stage()
    async def two(msg: Message) -> str:
        return "two"

    @app.stage(retry=Retry(attempts=2), timeout=1, max_concurrency=7)
    async def three(msg: Message, http: object) -> str:
        return "three"

    assert [stage.name for stage in app.spec.stages] == ["one", "two", "three"]
    assert [stage.function for stage in app.spec.stages] == [one, two, three]
    last = app.spec.stages[-1]
    assert (last.retry, last.timeout, last.max_concurrency, last.resources) == (
        Retry(attempts=2),
        1,
        7,
        ("http",),
    )


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
def test_any_callable_can_be_a_stage(
    function: Any, name: str, is_async: bool, resources: tuple[str, ...]
) -> None:
    app = make()
    app.stage(function)
    (stage,) = app.spec.stages
    assert (stage.name, stage.is_async, stage.resources) == (name, is_async, resources)


def no_argument() -> None: ...


def many(msg: Message, *clients: object) -> None: ...


def anything(msg: Message, **clients: object) -> None: ...


def by_name_only(*, msg: Message) -> None: ...


def by_place_only(msg: Message, http: object, /) -> None: ...


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (no_argument, "stage 'no_argument': it takes no argument; a stage is given the message"),
        (many, "'*clients' names no resource; list the resources it takes by name"),
        (anything, "'*clients' names no resource"),
        (by_name_only, "'msg' is keyword-only; the message comes by position"),
        (by_place_only, "'http' is positional-only; resources come by name"),
        (42, "it is not a function whose parameters can be read"),
        ("handle", "it is not a function"),
        (dict, "it is not a function"),
    ],
    ids=named,
)
def test_error_explains_functions_that_cannot_be_stages(function: Any, complaint: str) -> None:
    app = make()
    with pytest.raises(SettingsError) as caught:
        app.stage(function)
    assert complaint in str(caught.value)
    assert "App 'chat', stage " in str(caught.value)
    assert app.spec.stages == ()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"timeout": 0}, "App 'chat', stage 'handle': timeout must be seconds above 0, or None, got 0"),
        ({"timeout": math.inf}, "must be seconds above 0"),
        (
            {"max_concurrency": 0},
            "App 'chat', stage 'handle': max_concurrency must be a whole number of at least 1, or None, got 0",
        ),
        ({"max_concurrency": 2.0}, "must be a whole number"),
        ({"retry": 5}, "App 'chat', stage 'handle': retry must be a Retry"),
    ],
    ids=named,
)
def test_error_explains_stage_options_that_cannot_work(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make().stage(**settings)(handle)
    assert complaint in str(caught.value)


def test_timeout_of_a_plain_stage_is_refused() -> None:
    with pytest.raises(SettingsError, match="timeout= needs an 'async def' stage"):
        make().stage(timeout=1.0)(plain)


def test_a_stage_of_the_same_name_is_refused() -> None:
    app = make()
    app.stage(handle)
    with pytest.raises(SettingsError, match="stage 'handle': there is a stage of this name already"):
        app.stage(handle)


# Resources, and the check of the whole.


def test_resources_are_passed_by_name() -> None:
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
    assert list(app.spec.resources) == ["settings", "http"]
    assert app.spec.resources["http"].needs == ("settings",)


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
def test_error_explains_functions_that_cannot_be_resources(function: Any, complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make().resource(function)
    assert complaint in str(caught.value)
    assert "App 'chat', resource " in str(caught.value)


def test_an_app_without_stages_cannot_run() -> None:
    with pytest.raises(
        SettingsError, match=r"App 'chat' has no stages: declare at least one with @app.stage"
    ):
        make().check()


def test_unknown_resource_error_names_a_near_match() -> None:
    app = make()

    @app.resource
    def database() -> str:
        return ""

    @app.stage
    async def ask(msg: Message, databse: str) -> str:
        return databse

    with pytest.raises(SettingsError, match=r"stage 'ask': it takes 'databse'.*did you mean 'database'"):
        app.check()


def test_unknown_resource_error_names_all_resources() -> None:
    app = make()

    @app.resource
    def database() -> str:
        return ""

    @app.stage
    async def ask(msg: Message, http: str) -> str:
        return http

    with pytest.raises(SettingsError, match=r"it takes 'http'.*\(there are: database\)"):
        app.check()


def test_unknown_resource_error_says_how_to_declare_one() -> None:
    app = make()

    @app.stage
    async def ask(msg: Message, http: str) -> str:
        return http

    with pytest.raises(SettingsError, match=r"it takes 'http'.*declare it with @app.resource"):
        app.check()


def test_resource_can_only_take_earlier_ones() -> None:
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
