"""Results in virtual time: what a handler returns or yields, and what is then in the sinks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from keylane import App, Message, Poison, Result, Retry, SettingsError, Transient
from keylane.testing import Crash, Harness, Reject, RunResult

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from keylane import CallNext, SinkResult
    from keylane.spec import DeliveryMode

pytestmark = pytest.mark.usefixtures("quiet")

SOON = Retry(attempts=3, wait_initial=0.1, wait_max=0.1)


def make(**options: Any) -> App:
    return App(
        "fan", source="in", **{"sinks": ("items", "notes"), "retry": SOON, "commit_interval": 0.1, **options}
    )


def run(app: App, *values: bytes, key: bytes | None = b"k", headers: Any = (), **options: Any) -> RunResult:
    harness = Harness(app, **options)
    for number, value in enumerate(values):
        harness.send(key=key, value=value, headers=headers, at=number * 0.01)
    return harness.run()


def returning(app: App, made: Callable[[Message], Any]) -> App:
    @app.stage
    async def work(msg: Message) -> Any:
        return made(msg)

    return app


def values(result: RunResult) -> list[bytes | None]:
    return [written.value for written in result.results]


def ids(result: RunResult) -> list[bytes | None]:
    return [written.headers[-1][1] for written in result.results]


def error_of(result: RunResult) -> str:
    assert not result.results
    return result.dead[0].message


# One result.


def test_result_alone_is_like_its_value() -> None:
    plain, wrapped = (
        run(returning(make(), made), b"v", headers=[("a", b"1")])
        for made in (lambda msg: msg.value, lambda msg: Result(msg.value))
    )
    assert plain.results == wrapped.results
    assert plain.results[0].topic == "items"


def test_result_has_a_key_topic_and_timestamp_of_its_own() -> None:
    app = returning(make(), lambda _msg: Result({"n": 1}, key="other", topic="notes", timestamp=77))
    (found,) = run(app, b"v").results
    assert (found.topic, found.key, found.value, found.timestamp) == ("notes", b"other", b'{"n":1}', 77)


@pytest.mark.parametrize(
    ("key", "bytes_"), [(None, None), (7, b"7"), (b"\x00", b"\x00"), ("ü", "ü".encode())]
)
def test_key_of_a_result_is_encoded_as_in_a_publisher(key: Any, bytes_: bytes | None) -> None:
    (found,) = run(returning(make(), lambda _msg: Result("v", key=key)), b"v").results
    assert found.key == bytes_


def test_result_none_is_a_tombstone_and_none_is_nothing() -> None:
    app = returning(make(), lambda msg: Result(None) if msg.value == b"delete" else None)
    (found,) = run(app, b"delete", b"nothing").results
    assert (found.key, found.value) == (b"k", None)


def test_headers_of_a_result_replace_those_of_its_message() -> None:
    given = {"b": "new", "c": None, "d": b"more"}
    app = returning(make(), lambda _msg: Result("v", headers=given))
    sent = [("a", b"1"), ("b", b"2"), ("c", b"3"), ("b", b"4")]
    (found,) = run(app, b"v", headers=sent).results
    assert found.headers == [("a", b"1"), ("b", b"new"), ("d", b"more"), ("event-id", b"fan/in/2/0")]


@dataclass
class Item:
    name: str


class Note(BaseModel):
    text: str


def test_typed_values_are_json() -> None:
    @dataclass
    class Both:
        item: Item
        note: Note

    app = returning(make(), lambda _msg: Result(Both(Item("a"), Note(text="b"))))
    assert values(run(app, b"v")) == [b'{"item":{"name":"a"},"note":{"text":"b"}}']


def test_msgspec_structs_are_json() -> None:
    msgspec = pytest.importorskip("msgspec")
    point = msgspec.defstruct("Point", [("x", int)])
    assert values(run(returning(make(), lambda _msg: point(x=3)), b"v")) == [b'{"x":3}']


def test_encode_makes_bytes_of_values_but_not_of_bytes() -> None:
    app = make(encode=lambda value: f"<{value}>".encode())

    @app.stage
    async def work(_msg: Message) -> AsyncIterator[Any]:
        for value in (1, "text", b"bytes", Result(Item("a"), topic="notes"), Result(None)):
            yield value

    found = run(app, b"v").results
    assert [one.value for one in found if one.topic == "items"] == [b"<1>", b"<text>", b"bytes", None]
    assert [one.value for one in found if one.topic == "notes"] == [b"<Item(name='a')>"]


def test_encode_of_a_topic_is_for_its_results_alone() -> None:
    app = make(encode={"notes": lambda _value: b"note"})

    @app.stage
    def work(_msg: Message) -> Iterator[Any]:
        yield {"a": 1}
        yield Result({"a": 1}, topic="notes")

    assert values(run(app, b"v")) == [b'{"a":1}', b"note"]


def test_encode_may_return_none_for_a_null_value() -> None:
    assert values(run(returning(make(encode=lambda _value: None), lambda _msg: 1), b"v")) == [None]


# Several results.


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
@pytest.mark.parametrize("is_async", [False, True])
def test_generator_yields_results_in_order(delivery: DeliveryMode, is_async: bool) -> None:
    app = make(delivery=delivery)

    if is_async:

        @app.stage
        async def split(msg: Message) -> AsyncIterator[Any]:
            for item in msg.value.decode().split():
                await asyncio.sleep(0.001)
                yield Result(item, key=item[0])
            yield None
            yield Result(msg.value, topic="notes")

    else:

        @app.stage
        def split_in_a_thread(msg: Message) -> Iterator[Any]:
            for item in msg.value.decode().split():
                yield Result(item, key=item[0])
            yield None
            yield Result(msg.value, topic="notes")

    result = run(app, b"a1 b1 a2", b"a3", latency=(0.0, 1.0), partitions=4)
    result.verdict.raise_if_bad()
    by_key: dict[Any, list[Any]] = {}
    for written in result.results:
        by_key.setdefault((written.topic, written.key), []).append(written.value)
    assert by_key == {
        ("items", b"a"): [b"a1", b"a2", b"a3"],
        ("items", b"b"): [b"b1"],
        ("notes", b"k"): [b"a1 b1 a2", b"a3"],
    }
    place, again = b"/in/0/0", b"/in/0/1"
    names = {
        b"fan" + place,
        b"fan+1" + place,
        b"fan+2" + place,
        b"fan+3" + place,
        b"fan" + again,
        b"fan+1" + again,
    }
    assert set(ids(result)) == names


def test_generator_that_yields_nothing_has_no_result() -> None:
    app = make()

    @app.stage
    def nothing(_msg: Message) -> Iterator[Any]:
        yield from ()

    result = run(app, b"a", b"b")
    result.verdict.raise_if_bad()
    assert not result.results


def test_generator_that_fails_midway_writes_nothing_of_that_attempt() -> None:
    app = make()

    @app.stage
    async def split(msg: Message) -> AsyncIterator[Any]:
        yield b"%d" % msg.attempt
        if msg.attempt < 3:
            raise Transient("not yet")
        yield b"end"

    assert values(run(app, b"v")) == [b"3", b"end"]


def test_generator_that_fails_for_good_writes_nothing() -> None:
    app = make()

    @app.stage
    def split(_msg: Message) -> Iterator[Any]:
        yield b"first"
        raise Poison("bad")

    result = run(app, b"v")
    assert not result.results
    assert [dead.message for dead in result.dead] == ["bad"]


def test_generator_stage_has_a_timeout_and_resources() -> None:
    app = make(retry=Retry(attempts=1))

    @app.resource
    def table() -> dict[str, str]:
        return {"v": "found"}

    @app.stage(timeout=0.5)
    async def split(msg: Message, table: dict[str, str]) -> AsyncIterator[Any]:
        yield table[msg.value.decode()]
        await asyncio.sleep(0.4 if msg.offset == 0 else 0.6)

    result = run(app, b"v", b"v")
    assert values(result) == [b"found"]
    assert "took longer than 0.5 s" in result.dead[0].message


def test_generator_stage_takes_a_payload() -> None:
    app = make()

    @app.stage
    def split(item: Item, msg: Message) -> Iterator[Any]:
        yield from (item.name, msg.offset)

    assert values(run(app, b'{"name":"a"}')) == [b"a", b"0"]


def test_middleware_sees_what_a_generator_yielded() -> None:
    app = make()

    @app.middleware
    async def without_first(msg: Message, call_next: CallNext) -> Any:
        return [Result(value) for value in (await call_next(msg))[1:]]

    @app.stage
    def split(_msg: Message) -> Iterator[Any]:
        yield from ("a", "b", "c")

    assert values(run(app, b"v")) == [b"b", b"c"]


def test_list_of_results_is_several_results_and_a_list_is_json() -> None:
    app = returning(make(), lambda msg: [Result(1), Result(2)] if msg.offset else [1, 2])
    assert values(run(app, b"a", b"b")) == [b"[1,2]", b"1", b"2"]


def test_message_is_done_when_all_its_results_are() -> None:
    """The crash comes when one partition has acknowledged its result and the other has not."""
    app = make()

    @app.stage
    def split(_msg: Message) -> Iterator[Any]:
        for number in range(20):
            yield Result(b"%d" % number, key=b"%d" % number)

    result = run(app, b"v", latency=(0.0, 2.0), partitions=5, faults=[Crash(at=1.0)], seed=3)
    assert result.epochs == 2
    assert result.verdict.repeats == 1
    assert len(result.results) > 20, "some results were durable before the crash"
    assert set(values(result)) == {b"%d" % number for number in range(20)}
    twice = {written.value: written.headers for written in result.results}
    assert all(written.headers == twice[written.value] for written in result.results), (
        "a repeat has the same id"
    )


def test_results_of_exactly_once_are_there_together_or_not_at_all() -> None:
    app = make(delivery="exactly_once")

    @app.stage
    def split(msg: Message) -> Iterator[Any]:
        for number in range(5):
            yield Result(b"%s/%d" % (msg.value, number), key=b"%d" % number)

    sent = [b"%d" % number for number in range(40)]
    faults = [Crash(at=each) for each in (0.05, 0.15, 0.21, 0.3)]
    result = run(app, *sent, commits=(0.0, 0.1), partitions=3, faults=faults)
    result.verdict.raise_if_bad()
    assert sorted(map(str, values(result))) == sorted(
        str(b"%s/%d" % (each, n)) for each in sent for n in range(5)
    )


def test_rejected_results_fail_their_message_together() -> None:
    app = make()

    @app.stage
    def split(_msg: Message) -> Iterator[Any]:
        yield from (b"1", b"2")

    result = run(app, b"a", b"b", faults=[Reject(at=0.0, for_=0.005)])
    assert values(result) == [b"1", b"2"]
    assert [dead.value for dead in result.dead] == [b"a"]


# Handlers by type, batch stages, sinks of the user's own.


def test_handlers_of_a_type_yield_results_with_ids_of_their_own() -> None:
    app = make()

    @app.on("Order")
    def split(_msg: Message) -> Iterator[Any]:
        yield from ("a", "b")

    @app.on("Order")
    async def note(_msg: Message) -> Result:
        return Result("n", topic="notes", key="x")

    result = run(app, b"v", headers=[("event-type", b"Order"), ("event-id", b"e")])
    found = {(written.topic, written.value): written.headers[-1][1] for written in result.results}
    assert found == {("items", b"a"): b"fan/e", ("items", b"b"): b"fan+1/e", ("notes", b"n"): b"fan:note/e"}


@pytest.mark.parametrize("is_async", [False, True])
def test_batch_stage_has_several_results_for_a_message(is_async: bool) -> None:
    app = make()

    def parts(msg: Message) -> Iterator[Any]:
        for part in msg.value.decode().split():
            if part == "bad":
                raise Poison("bad part")
            yield part

    async def slowly(msg: Message) -> AsyncIterator[Any]:
        for part in parts(msg):
            await asyncio.sleep(0.001)
            yield part

    if is_async:

        @app.batch_stage
        async def split(msgs: list[Message]) -> list[Any]:
            return [slowly(msg) if msg.offset else parts(msg) for msg in msgs]

    else:

        @app.batch_stage
        def split_in_a_thread(msgs: list[Message]) -> list[Any]:
            return [[Result("l")] if msg.value == b"list" else parts(msg) for msg in msgs]

    result = run(app, b"a b", b"bad", b"", b"c", *([] if is_async else [b"list"]))
    assert values(result) == [b"a", b"b", b"c", *([] if is_async else [b"l"])]
    assert [dead.message for dead in result.dead] == ["bad part"]


class Table:
    """Keeps what it is given; takes it at the second attempt only."""

    calls: list[list[SinkResult]]

    def __init__(self) -> None:
        type(self).calls = []

    async def open(self) -> None: ...

    async def write(self, results: Any, /) -> None:
        type(self).calls.append(list(results))
        if len(type(self).calls) == 1:
            raise Transient("not yet")

    async def close(self) -> None: ...


def test_sink_of_ones_own_is_given_all_results_of_a_message() -> None:
    app = make(sinks=(), sink=Table())

    @app.stage
    def split(msg: Message) -> Iterator[Any]:
        if msg.value:
            yield Result("a", key="x", headers={"h": "1"}, timestamp=5)
            yield Result(None)

    run(app, b"v", b"")
    assert len(Table.calls) == 2, "twice for the first message, never for one without results"
    assert Table.calls[0] == Table.calls[1]
    first, second = Table.calls[1]
    assert (first.key, first.value, first.timestamp, first.event_id) == (b"x", b"a", 5, "fan/in/2/0")
    assert ("h", b"1") in first.headers
    assert (second.key, second.value, second.event_id) == (b"k", None, "fan+1/in/2/0")


# What cannot be written.


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (
            Result(1, topic="else"),
            "for topic 'else', which is not a sink of app 'fan'; its sinks are 'items', 'notes'",
        ),
        (Result(1, topic=3), "for topic 3, which is not a sink"),  # type: ignore[arg-type]
        (Result(1, key=[1]), "whose key cannot be written: a key is text, bytes, a whole number or a UUID"),  # type: ignore[arg-type]
        (Result(1, timestamp=-1), "whose timestamp is -1; expected milliseconds"),
        (Result(1, timestamp=1.5), "whose timestamp is 1.5"),  # type: ignore[arg-type]
        (Result(1, headers={"event-id": "x"}), "contain 'event-id', which Keylane derives"),
        (Result(1, headers={"a": 1}), "contain 'a': 1; expected a name and text, bytes or None"),  # type: ignore[arg-type]
        (Result(1, headers="abc"), "whose headers are a str; expected a dict"),  # type: ignore[arg-type]
        (Result(1, headers=["abc"]), "contain 'abc'; expected a name and a value"),  # type: ignore[list-item]
        (Result({1, 2}), "returned a set that is neither bytes, nor text, nor JSON"),
        ([Result(1), 2], "returned a list with Results and other values"),
        ({"a": [Result(1)]}, "field 'a[0]': a Result is a result of its own: return or yield it"),
        ([2, Result(1)], "returned a list with Results and other values"),
    ],
)
def test_wrong_result_fails_its_message_for_good(made: Any, complaint: str) -> None:
    assert complaint in error_of(run(returning(make(), lambda _msg: made), b"v"))


def test_undeclared_topic_is_the_failure_of_its_handler() -> None:
    app = make()

    @app.on("a")
    def first(_msg: Message) -> Result:
        return Result(1)

    @app.on("a")
    def second(_msg: Message) -> Result:
        return Result(1, topic="else")

    result = run(app, b"v", headers=[("event-type", b"a")])
    assert not result.results, "of a message that fails for good there are none"
    assert (result.dead[0].stage, result.dead[0].message[:15]) == ("second", "stage 'second' ")


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (
            lambda _value: "text",
            "encode= of app 'fan' must return bytes, or None for a null value; it returned a str",
        ),
        (
            lambda value: value["x"] + 1 if isinstance(value, dict) else int("x"),
            "encode= cannot write: invalid literal",
        ),
    ],
)
def test_encode_that_fails_is_the_failure_of_its_message(function: Any, complaint: str) -> None:
    assert complaint in error_of(run(returning(make(encode=function), lambda _msg: 5), b"v"))


def test_encode_may_ask_for_another_attempt() -> None:
    asked = []

    def encode(value: Any) -> bytes:
        asked.append(value)
        if len(asked) < 2:
            raise Transient("the registry is away")
        return b"encoded"

    result = run(returning(make(encode=encode), lambda _msg: 5), b"v")
    assert values(result) == [b"encoded"]


@pytest.mark.parametrize(
    ("sink", "complaint"), [(Table(), "go to Table: leave out topic="), (None, "rows of Spark")]
)
def test_topic_of_a_result_needs_sinks(sink: Any, complaint: str) -> None:
    app = make(sinks=(), sink=sink, commit="live" if sink else "epoch")
    assert complaint in error_of(run(returning(app, lambda _msg: Result(1, topic="items")), b"v"))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"sink": "a"}, "it has sink='a' and sinks=('items', 'notes'); write only sinks="),
        ({"sink": Table()}, "and sinks=('items', 'notes'); write only sinks="),
        ({"sinks": "items"}, "sinks must be a tuple of topics, such as ('items', 'invoices'), got 'items'"),
        ({"sinks": ("a", "a")}, "sinks=('a', 'a') names a topic twice"),
        ({"sinks": ("a", "b c")}, "each of sinks must be 1 to 249 letters"),
        ({"sinks": ("a", "in")}, "source and sink are both 'in'"),
        ({"sinks": ("a", "fan.state")}, "is the app's own topic"),
        ({"sinks": ("a", "b"), "commit": "epoch"}, "it takes no sink="),
        ({"encode": "json"}, "encode must be a function that makes bytes of a result's value"),
        (
            {"encode": {"x": bytes}},
            "encode= has a function for 'x', which is not a sink; sinks: 'items', 'notes'",
        ),
        ({"encode": {"items": 1}}, "encode['items'] must be a function, got 1"),
    ],
)
def test_sinks_and_encode_are_checked(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make(**settings)
    assert complaint in str(caught.value)


def test_generator_must_be_the_last_stage() -> None:
    app = make()

    @app.stage
    def split(_msg: Message) -> Iterator[Any]:
        yield 1

    async def after(_msg: Message) -> None: ...

    async def batch(msgs: list[Message]) -> list[None]:
        return [None for _ in msgs]

    with pytest.raises(
        SettingsError, match=r"stage 'after': the stage before it, 'split', is a generator, which must"
    ):
        app.stage(after)
    with pytest.raises(
        SettingsError, match="batch stage 'batch': the stage before it, 'split', is a generator"
    ):
        app.batch_stage(batch)


def test_result_must_come_from_the_last_stage() -> None:
    app = make()

    @app.stage
    async def first(_msg: Message) -> Result:
        return Result(1)

    app.check()

    @app.stage
    async def last(_msg: Message) -> bytes:
        return b""

    with pytest.raises(SettingsError, match=r"stage 'first': it returns a Result, and 'last' comes after it"):
        app.check()
