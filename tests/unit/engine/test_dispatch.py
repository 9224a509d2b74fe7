"""Handlers by event type, in virtual time: every sentence of docs/guarantees.md about them."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Breaker, Field, Message, Outcome, Poison, Retry, SettingsError, Transient
from keylane.testing import Crash, Drain, Fault, Harness, RunResult

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.usefixtures("quiet")

SOON = Retry(attempts=3, wait_initial=0.1, wait_max=0.1)


def make(**options: Any) -> App:
    return App("orders", source="in", **{"sink": "out", "retry": SOON, "commit_interval": 0.1, **options})


def shop(**options: Any) -> App:
    """Placed and paid, each of 10 ms; what they return names them."""
    app = make(**options)

    @app.on("OrderPlaced")
    async def placed(msg: Message) -> str:
        await asyncio.sleep(0.01)
        return f"placed {msg.value.decode()}"

    @app.on("OrderPaid")
    async def paid(msg: Message) -> str:
        await asyncio.sleep(0.001)
        return f"paid {msg.value.decode()}"

    return app


def run(
    app: App, events: Sequence[tuple[bytes | None, str | None, bytes]], faults: Sequence[Fault] = ()
) -> RunResult:
    """Key, type and value, 5 ms apart."""
    harness = Harness(app, faults=faults)
    for number, (key, kind, value) in enumerate(events):
        headers = [] if kind is None else [("event-type", kind.encode())]
        harness.send(key=key, value=value, headers=headers, at=number * 0.005)
    return harness.run()


def values(result: RunResult, key: bytes) -> list[str]:
    return [written.value.decode() for written in result.results if written.key == key]


# One lane, many types.


def test_dispatch_keeps_one_order_for_all_types() -> None:
    events = [(b"o%d" % (n % 3), ("OrderPlaced", "OrderPaid")[n % 2], b"%d" % n) for n in range(30)]
    result = run(shop(), events)
    result.verdict.raise_if_bad()
    for key in (b"o0", b"o1", b"o2"):
        expected = [
            f"{'placed' if kind == 'OrderPlaced' else 'paid'} {value.decode()}"
            for of, kind, value in events
            if of == key
        ]
        assert values(result, key) == expected


def test_dispatch_handler_of_several_types_knows_the_type() -> None:
    app = make()

    @app.on("OrderPaid", "OrderShipped")
    async def moved(msg: Message) -> str | None:
        return msg.type

    result = run(app, [(b"a", "OrderShipped", b"1"), (b"a", "OrderPaid", b"2")])
    assert values(result, b"a") == ["OrderShipped", "OrderPaid"]


def test_the_type_may_be_another_header_or_a_field_of_the_value() -> None:
    for event_type, decode in (
        (Field("meta.type"), "json"),
        (Field("meta.type"), None),
        (lambda msg: msg.type or json.loads(msg.value)["meta"]["type"], None),
        ("kind", None),
    ):
        app = make(event_type=event_type, decode=decode)

        @app.on("OrderPaid")
        async def paid(msg: Message) -> str | None:
            return msg.type

        harness = Harness(app)
        harness.send(
            key=b"a", value=b'{"meta": {"type": "OrderPaid"}}', headers=[("kind", b"OrderPaid")], at=0.0
        )
        result = harness.run()
        assert values(result, b"a") == ["OrderPaid"], event_type


# Several handlers for one type.


def several(flaky: str = "", error: Exception | None = None, attempts: int = 1, **options: Any) -> App:
    """Three handlers of one type that note their calls; ``flaky`` fails this many times."""
    app = make(**options)
    app.calls = []  # type: ignore[attr-defined]

    def note(msg: Message, name: str) -> str | None:
        app.calls.append((name, msg.value.decode(), msg.attempt))  # type: ignore[attr-defined]
        if name == flaky and msg.attempt <= attempts:
            raise error or Transient("later")
        return f"{name} {msg.value.decode()}"

    @app.on("OrderPaid")
    async def book(msg: Message) -> str | None:
        return note(msg, "book")

    @app.on("OrderPaid")
    async def mail(msg: Message) -> None:
        note(msg, "mail")

    @app.on("OrderPaid")
    async def ship(msg: Message) -> str | None:
        return note(msg, "ship")

    return app


def test_dispatch_runs_handlers_in_declared_order() -> None:
    app = several()
    result = run(app, [(b"a", "OrderPaid", b"1"), (b"a", "OrderPaid", b"2")])
    assert app.calls == [(name, value, 1) for value in "12" for name in ("book", "mail", "ship")]  # type: ignore[attr-defined]
    assert values(result, b"a") == ["book 1", "ship 1", "book 2", "ship 2"]


def test_dispatch_retry_does_not_rerun_earlier_handlers() -> None:
    app = several("mail", attempts=2)
    result = run(app, [(b"a", "OrderPaid", b"1"), (b"a", "OrderPaid", b"2")])
    result.verdict.raise_if_bad()
    first = [call for call in app.calls if call[1] == "1"]  # type: ignore[attr-defined]
    assert first == [("book", "1", 1), ("mail", "1", 1), ("mail", "1", 2), ("mail", "1", 3), ("ship", "1", 1)]
    assert values(result, b"a") == ["book 1", "ship 1", "book 2", "ship 2"]


def test_each_handler_has_attempts_of_its_own() -> None:
    app = make()
    seen: list[tuple[str, int]] = []

    @app.on("OrderPaid", retry=Retry(attempts=2, wait_initial=0.1))
    async def one(msg: Message) -> None:
        seen.append(("one", msg.attempt))
        if msg.attempt < 2:
            raise Transient("later")

    @app.on("OrderPaid", retry=Retry(attempts=4, wait_initial=0.1))
    async def two(msg: Message) -> None:
        seen.append(("two", msg.attempt))
        if msg.attempt < 4:
            raise Transient("later")

    result = run(app, [(b"a", "OrderPaid", b"1")])
    assert seen == [("one", 1), ("one", 2), ("two", 1), ("two", 2), ("two", 3), ("two", 4)]
    assert result.dead == []


def test_dispatch_attempts_survive_a_short_epoch() -> None:
    app = several("mail", attempts=99, retry=Retry(attempts=4, wait_initial=3, wait_max=3), drain_timeout=0.5)
    result = run(app, [(b"a", "OrderPaid", b"1")], [Drain(at=1), Drain(at=2), Drain(at=4), Drain(at=6)])
    assert [attempt for name, _, attempt in app.calls if name == "mail"] == [1, 2, 3, 4]  # type: ignore[attr-defined]
    (dead,) = result.dead
    assert (dead.stage, dead.value) == ("mail", b"1")


def test_dispatch_failed_message_has_no_results() -> None:
    app = several("ship", Poison("no address"))
    result = run(app, [(b"a", "OrderPaid", b"1"), (b"a", "OrderPaid", b"2")])
    result.verdict.raise_if_bad()
    assert result.results == []
    assert [(dead.stage, dead.message, dead.value) for dead in result.dead] == [
        ("ship", "no address", b"1"),
        ("ship", "no address", b"2"),
    ]


def test_results_of_one_message_have_event_ids_of_their_own() -> None:
    harness = Harness(several())
    headers = [("event-type", b"OrderPaid"), ("x", b"y")]
    harness.send(key=b"a", value=b"1", headers=[*headers, ("event-id", b"e1")])
    harness.send(key=b"a", value=b"2", headers=headers)
    result = harness.run()
    ids = [dict(written.headers)["event-id"] for written in result.results]
    place = f"in/{harness.log.choose('in', b'a')}/1".encode()
    assert ids == [b"orders/e1", b"orders:ship/e1", b"orders/" + place, b"orders:ship/" + place]
    assert all(("x", b"y") in written.headers for written in result.results)


def echo(name: str, source: str, sink: str, said: bytes = b"") -> App:
    app = App(name, source=source, sink=sink)

    @app.stage
    async def say(msg: Message) -> bytes:
        return said + bytes(msg.value)

    return app


def test_results_of_two_apps_in_one_topic_all_run() -> None:
    written = []
    for name in ("billing", "shipping"):
        first = Harness(echo(name, "orders", "facts", name.encode()), partitions=1)
        for number in range(6):
            first.send(
                key=b"o%d" % (number % 3), value=b"%d" % number, headers=[("event-id", b"e%d" % number)]
            )
        written += first.run().results
    third = Harness(echo("third", "facts", "out"), partitions=1)
    for _ in range(2):  # what an app writes again after a crash is still a repeat
        for fact in written:
            third.send(key=fact.key, value=fact.value, headers=fact.headers)
    result = third.run()
    assert len(result.results) == 12
    assert len(result.duplicates) == 12


def test_result_ids_do_not_grow_for_ever_in_a_cycle() -> None:
    headers: Any = [("event-id", b"e")]
    sizes = []
    for _ in range(100):
        harness = Harness(echo("a-rather-long-name", "in", "out"), partitions=1)
        harness.send(key=b"k", value=b"v", headers=headers)
        (written,) = harness.run().results
        headers = written.headers
        sizes.append(len(dict(headers)["event-id"] or b""))
    assert max(sizes) <= 256
    assert len(headers) == 1


def test_dispatch_crash_between_handlers_reruns_all_of_them() -> None:
    app = make()
    seen: list[str] = []

    @app.on("OrderPaid")
    async def one(msg: Message) -> str:
        seen.append("one")
        return "one"

    @app.on("OrderPaid")
    async def two(msg: Message) -> str:
        seen.append("two")
        await asyncio.sleep(10)
        return "two"

    result = run(app, [(b"a", "OrderPaid", b"1")], [Crash(at=5)])
    assert seen == ["one", "two", "one", "two"]
    assert values(result, b"a") == ["one", "two"]


def test_dispatch_handler_has_the_options_of_a_stage() -> None:
    app = make(retry=Retry(attempts=4, wait_initial=0.1))
    together: list[int] = []
    at_once = 0

    @app.resource
    def client() -> str:
        return "client"

    @app.on("A", max_concurrency=2, timeout=1.0, breaker=Breaker())
    async def limited(msg: Message, client: str) -> str:
        nonlocal at_once
        at_once += 1
        together.append(at_once)
        try:
            await asyncio.sleep(5.0 if msg.attempt == 1 and msg.key == b"k0" else 0.1)
        finally:
            at_once -= 1
        return client

    @app.on("B")
    def plain(msg: Message, client: str) -> str:
        return f"{client} in a thread"

    events = [(b"k%d" % (n % 4), "A", b"") for n in range(8)]
    result = run(app, [*events, (b"b", "B", b"")])
    result.verdict.raise_if_bad()
    assert max(together) == 2
    assert values(result, b"k0") == ["client"] * 2
    assert result.verdict.counts.retried == 2, "they timed out once, and ran again"
    assert values(result, b"b") == ["client in a thread"]


# Types without a handler.


def test_dispatch_type_without_a_handler_is_poison() -> None:
    result = run(shop(), [(b"a", "OrderLost", b"1"), (b"a", "OrderPaid", b"2"), (b"a", None, b"3")])
    result.verdict.raise_if_bad()
    assert values(result, b"a") == ["paid 2"]
    assert [(dead.stage, dead.message) for dead in result.dead] == [
        (
            "(dispatch)",
            "no handler for event type 'OrderLost'; there are handlers for: OrderPaid, OrderPlaced",
        ),
        (
            "(dispatch)",
            "no event type (header 'event-type' is missing); there are handlers for: OrderPaid, OrderPlaced",
        ),
    ]


def test_dispatch_ignored_types_are_done_in_lane_order() -> None:
    seen: list[tuple[bytes | None, str]] = []

    class Watcher:
        def started(self, message: Message, attempt: int) -> None: ...
        def ended(self, message: Message, attempt: int, outcome: str) -> None:
            seen.append((message.value, outcome))

    app = shop(unhandled="ignore", observer=Watcher())
    result = run(app, [(b"a", "OrderPlaced", b"1"), (b"a", "Other", b"2"), (b"a", "OrderPaid", b"3")])
    result.verdict.raise_if_bad()
    assert values(result, b"a") == ["placed 1", "paid 3"]
    assert result.dead == []
    assert [outcome for _, outcome in seen] == [Outcome.OK, Outcome.IGNORED, Outcome.OK]
    assert Outcome.IGNORED.value == "ignored"


def test_a_handler_for_all_other_types() -> None:
    app = shop()

    @app.on_unhandled
    async def rest(msg: Message) -> str:
        return f"{msg.type} {msg.value.decode()}"

    result = run(app, [(b"a", "X", b"1"), (b"a", "OrderPaid", b"2"), (b"a", None, b"3")])
    assert values(result, b"a") == ["X 1", "paid 2", "None 3"]


def test_dispatch_undecodable_value_is_poison() -> None:
    result = run(shop(decode="json"), [(b"a", "OrderPaid", b"{")])
    assert [dead.stage for dead in result.dead] == ["(dispatch)"]


# Invalid declarations are refused when the app is built.


async def handle(msg: Message) -> None: ...


async def other(msg: Message) -> None: ...


def test_stages_and_handlers_do_not_mix() -> None:
    app = make()
    app.stage(handle)
    with pytest.raises(
        SettingsError, match=r"handler 'other': app 'orders' has 'handle' already; an app has either"
    ):
        app.on("X")(other)
    app = make()
    app.on("X")(handle)
    with pytest.raises(
        SettingsError, match=r"stage 'other': app 'orders' has 'handle' already; an app has either"
    ):
        app.stage(other)


@pytest.mark.parametrize(
    ("types", "complaint"),
    [
        ((), "@app.on() names no event type"),
        (("",), "needs the name of an event type"),
        ((handle,), "write @app.on('OrderPaid')"),
        ((b"X",), "needs the name of an event type"),
        (("X", "X"), "names a type twice"),
    ],
)
def test_types_that_make_no_sense_are_refused_in_words(types: tuple[Any, ...], complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make().on(*types)
    assert complaint in str(caught.value)


def test_dispatch_refuses_contradicting_options() -> None:
    for option in ({"event_type": "kind"}, {"unhandled": "ignore"}):
        app = make(**option)
        app.stage(handle)
        with pytest.raises(SettingsError, match="is for apps with handlers"):
            app.check()
    app = make(unhandled="ignore")
    app.on("X")(handle)
    app.on_unhandled(other)
    with pytest.raises(
        SettingsError, match="'other' is the handler of all other types; leave one of them out"
    ):
        app.check()
    app = make()
    app.on_unhandled(other)
    with pytest.raises(SettingsError, match="make it a stage"):
        app.check()
    with pytest.raises(SettingsError, match="'other' is the handler of all other types already"):
        app.on_unhandled(handle)
    for wrong in ({"unhandled": "drop"}, {"event_type": 5}, {"event_type": ""}):
        with pytest.raises(SettingsError, match=r"must be"):
            make(**wrong)
    for path in ("", "a..b", 5):
        with pytest.raises(SettingsError, match="expected the name of a field"):
            Field(path)  # type: ignore[arg-type]


def test_a_handler_that_takes_something_unknown_is_refused() -> None:
    app = make()

    @app.on("X")
    async def needs(msg: Message, http: object) -> None: ...

    with pytest.raises(SettingsError, match="handler 'needs': it takes 'http', which is not a resource"):
        app.check()
