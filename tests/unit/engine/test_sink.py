"""A sink of the user's own, in virtual time."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from pyspark import cloudpickle

from keylane import App, Message, Poison, ResourceError, Retry, SettingsError, Sink, SinkResult, Transient
from keylane.testing import Crash, Drain, Harness, RunResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.testing import Fault

pytestmark = pytest.mark.usefixtures("quiet")

SOON = Retry(attempts=3, wait_initial=0.1, wait_max=0.1)


class Table:
    """Acknowledges after a second, and fails as its test says. Copies of it are opened: its lists are shared."""

    def __init__(self, *failures: Exception) -> None:
        self.rows: list[SinkResult] = []
        self.calls: list[str] = []
        self.writing: set[bytes | None] = set()
        self.many: list[int] = []  # of keys, at every write
        self.failures = list(failures)

    async def open(self) -> None:
        self.calls.append("open")
        self.client = asyncio.Lock()  # cannot be shared by tasks

    async def write(self, results: Sequence[SinkResult], /) -> None:
        key = results[0].key
        assert key not in self.writing, "two of one key"
        self.writing.add(key)
        self.many.append(len(self.writing))
        try:
            await asyncio.sleep(1)
            if self.failures:
                raise self.failures.pop(0)
            self.rows += results
        finally:
            self.writing.discard(key)

    async def close(self) -> None:
        self.calls.append("close")


def make(sink: Any, ran: list[bytes] | None = None, **options: Any) -> App:
    app = App("shop", source="in", sink=sink, **{"retry": SOON, **options})

    @app.stage
    async def shout(msg: Message) -> bytes | None:
        if ran is not None:
            ran.append(msg.value)
        return None if msg.value == b"quiet" else bytes(msg.value).upper()

    return app


def run(app: App, *messages: tuple[bytes, bytes], faults: Sequence[Fault] = ()) -> RunResult:
    harness = Harness(app, faults=faults)
    for key, value in messages:
        harness.send(key=key, value=value)
    result = harness.run()
    assert not result.verdict.lost
    return result


def test_sink_gets_results_in_order_and_keys_in_parallel() -> None:
    table = Table()
    messages = [(b"k%d" % (n % 3), b"v%d" % n) for n in range(30)]
    result = run(make(table), *messages)
    for key in (b"k0", b"k1", b"k2"):
        assert [row.value for row in table.rows if row.key == key] == [
            value.upper() for lane, value in messages if lane == key
        ]
    assert max(table.many) == 3
    assert 10 <= result.elapsed < 12
    assert table.calls == ["open", "close"]


def test_sink_result_has_the_fields_of_a_record() -> None:
    table = Table()
    harness = Harness(make(table))
    harness.send(key=b"a", value=b"x", headers={"event-id": "e-1", "tenant": "t"}, at=2.0)
    harness.run()
    (row,) = table.rows
    assert (row.key, row.value, row.event_id, row.timestamp) == (b"a", b"X", "shop/e-1", 2000)
    assert row.headers == [("tenant", b"t"), ("event-id", b"shop/e-1")]


def test_sink_is_not_called_without_a_result() -> None:
    table = Table()
    run(make(table), (b"a", b"quiet"))
    assert table.rows == []


def test_sink_error_is_retried_without_the_stages() -> None:
    table, ran = Table(Transient("busy")), list[bytes]()
    run(make(table, ran), (b"a", b"1"), (b"a", b"2"))
    assert [row.value for row in table.rows] == [b"1", b"2"]
    assert ran == [b"1", b"2"]


def test_sink_poison_follows_the_failure_policy() -> None:
    table = Table(Poison("no such column"))
    result = run(make(table), (b"a", b"1"), (b"a", b"2"))
    assert [row.value for row in table.rows] == [b"2"]
    assert [(dead.value, dead.stage, dead.message) for dead in result.dead] == [
        (b"1", "(sink)", "no such column")
    ]


def test_sink_that_blocks_keeps_its_lane() -> None:
    table = Table(Poison("no such column"))
    result = run(make(table, on_failure="block"), (b"a", b"1"), (b"a", b"2"))
    assert table.rows == []
    assert len(result.waiting) == 2


def test_sink_gets_the_results_of_all_handlers_together() -> None:
    table = Table(Transient("busy"))
    app = App("shop", source="in", sink=table, retry=SOON)
    ran = []

    @app.on("Placed")
    async def first(msg: Message) -> bytes:
        ran.append("first")
        return bytes(msg.value) + b"1"

    @app.on("Placed")
    async def second(msg: Message) -> bytes:
        ran.append("second")
        return bytes(msg.value) + b"2"

    harness = Harness(app)
    harness.send(key=b"a", value=b"v", headers={"event-type": "Placed", "event-id": "e"})
    harness.run()
    assert [(row.value, row.event_id) for row in table.rows] == [(b"v1", "shop/e"), (b"v2", "shop:second/e")]
    assert ran == ["first", "second"]


@pytest.mark.parametrize("fault", [Crash(at=2.5), Drain(at=2.5)])
def test_sink_loses_nothing_when_a_task_ends(fault: Fault) -> None:
    table = Table()
    run(make(table), *[(b"a", b"%d" % n) for n in range(6)], faults=[fault])
    seen = [row.value for row in table.rows]
    assert list(dict.fromkeys(seen)) == [b"%d" % n for n in range(6)]
    assert len(seen) <= 9
    assert len({row.event_id for row in table.rows}) == 6
    assert table.calls == ["open", "close"] * 2


def test_sink_that_cannot_open_is_named() -> None:
    class Down(Table):
        async def open(self) -> None:
            raise OSError("no route")

    with pytest.raises(
        ResourceError, match=r"the sink of app 'shop', Down, could not be opened: OSError: no route"
    ):
        run(make(Down()), (b"a", b"1"))


def test_sink_travels_with_its_app() -> None:
    table = Table()
    travelled: App = pickle.loads(cloudpickle.dumps(make(table)))  # type: ignore[no-untyped-call]  # noqa: S301 - our own
    run(travelled, (b"a", b"1"))
    assert table.rows == []
    arrived: Any = travelled.spec.custom_sink
    assert [row.value for row in arrived.rows] == [b"1"]


class _NoClose:
    async def open(self) -> None: ...
    async def write(self, results: Sequence[SinkResult], /) -> None: ...


class TestSettings:
    refused: ClassVar[list[tuple[Any, dict[str, Any], str]]] = [
        (Table(), {"delivery": "exactly_once"}, r"sink=Table\(…\) is not written in a Kafka transaction"),
        (Table(), {"commit": "epoch"}, r"commit='epoch' does not fit; choose commit='live'"),
        (Table, {}, r"sink must be an object, found the class Table; write sink=Table\(…\)"),
        (_NoClose(), {}, r"sink must be"),
    ]

    @pytest.mark.parametrize(("sink", "options", "why"), refused)
    def test_sink_that_cannot_work_is_refused(self, sink: Any, options: dict[str, Any], why: str) -> None:
        with pytest.raises(SettingsError, match=why):
            App("shop", source="in", sink=sink, **options)

    def test_sink_of_its_own_has_no_topic(self) -> None:
        table = Table()
        app = make(table)
        assert (app.sink, app.spec.custom_sink) == (None, table)
        assert isinstance(table, Sink)
