"""Ordered DataFrame rows without Spark: one task over record batches."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from keylane import (
    App,
    CallNext,
    FailureGuard,
    FailureGuardError,
    Idempotency,
    Message,
    Poison,
    ResourceError,
    Retry,
    SettingsError,
    SinkResult,
    Transient,
)
from keylane.dataframe.rows import FramePlan
from keylane.dataframe.task import FrameTask
from keylane.testing import HistoryWriter, Sent, check, read_history

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

QUICK = Retry(wait_initial=0.001, wait_max=0.01)


def plan(**more: Any) -> FramePlan:
    usual: dict[str, Any] = {
        "source": "in", "order_by": ("at",), "carried": (0,), "position": False, "topic": False,
        "timestamp": False, "headers": False, "event_id": False, "stream": False,
    }  # fmt: skip
    return FramePlan(**{**usual, **more})


def batch(rows: Iterable[dict[str, Any]], **types: pa.DataType) -> pa.RecordBatch:
    known = {"key": pa.binary(), "value": pa.binary(), "order_0": pa.int64(), **types}
    return pa.RecordBatch.from_pylist(list(rows), schema=pa.schema(list(known.items())))


def numbered(count: int, keys: int) -> list[dict[str, Any]]:
    return [{"key": b"k%d" % (i % keys), "value": b"%d" % i, "order_0": i} for i in range(count)]


def run(app: App, batches: Iterable[pa.RecordBatch], **more: Any) -> list[dict[str, Any]]:
    done = list(FrameTask(app.spec, plan(**more), task=3, epoch=0).run(iter(batches)))
    return pa.Table.from_batches(done).to_pylist() if done else []


def shop(name: str = "shop", **settings: Any) -> App:
    """Values that end in ! never work; those that end in ? work at the third attempt."""
    app = App(name, source="in", **{"sink": "out", "retry": QUICK, "failure_guard": None, **settings})

    @app.stage
    async def work(msg: Message) -> bytes:
        if msg.value.endswith(b"!"):
            raise Poison("broken")
        if msg.value.endswith(b"?") and msg.attempt < 3:
            raise Transient("not yet")
        return bytes(msg.value.upper())

    return app


def by_key(rows: list[dict[str, Any]]) -> dict[bytes | None, list[dict[str, Any]]]:
    found: dict[bytes | None, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["key"], []).append(row)
    return found


def test_rows_run_in_order_per_key_and_keys_in_parallel(tmp_path: Path) -> None:
    app = shop(observer=HistoryWriter(tmp_path / "history"))
    rows = [
        {**row, "value": b"%d%s" % (i, b"?" if i % 10 == 7 else b"")}
        for i, row in enumerate(numbered(3_000, 100))
    ]
    found = run(app, [batch(rows[:1_700]), batch(rows[1_700:])])
    assert len(found) == 3_000
    for key, lane in by_key(found).items():
        expected = [row for row in rows if row["key"] == key]
        assert [row["at"] for row in lane] == [row["order_0"] for row in expected]
        assert [row["result"] for row in lane] == [row["value"].upper() for row in expected]
    assert {row["outcome"] for row in found} == {"ok"}
    assert sum(row["attempts"] for row in found) == 3_000 + 2 * 300
    sent = [Sent(row["key"], 3, number) for number, row in enumerate(rows)]
    verdict = check(read_history(tmp_path / "history"), sent=sent)
    verdict.raise_if_bad()
    assert verdict.counts.retried == 300


def test_middleware_runs_around_the_stages_of_a_frame() -> None:
    app = shop()

    @app.middleware
    async def mark(msg: Message, call_next: CallNext) -> bytes:
        return b"<%s>" % await call_next(msg)

    found = run(app, [batch(numbered(3, 3))])
    assert [row["result"] for row in found] == [b"<0>", b"<1>", b"<2>"]


def test_sink_of_its_own_is_not_used_by_a_frame() -> None:
    class Refusing:
        async def open(self) -> None:
            raise AssertionError("a frame's results are rows")

        async def write(self, results: Sequence[SinkResult], /) -> None: ...
        async def close(self) -> None: ...

    found = run(shop(sink=Refusing()), [batch(numbered(3, 3))])
    assert [row["result"] for row in found] == [b"0", b"1", b"2"]


def test_lanes_of_a_frame_wait_in_parallel() -> None:
    app = App("slow", source="in", sink="out")

    @app.stage
    async def wait(msg: Message) -> None:
        await asyncio.sleep(0.05)

    began = time.monotonic()
    assert len(run(app, [batch(numbered(1_000, 500))])) == 1_000
    assert time.monotonic() - began < 2.5, "lanes did not run in parallel: one by one they need 50 seconds"


def test_dead_row_has_its_failure_and_its_lane_continues() -> None:
    rows = numbered(20, 2)
    rows[4]["value"] = b"4!"
    found = run(shop(), [batch(rows)])
    (dead,) = (row for row in found if row["outcome"] == "dead")
    assert (dead["at"], dead["attempts"], dead["error"], dead["result"]) == (4, 1, "Poison: broken", None)
    letter = json.loads(dead["letter"])
    assert (letter["stage"], letter["error"], letter["message"]) == (
        "work",
        "keylane.errors.Poison",
        "broken",
    )
    assert "Traceback" in letter["traceback"]
    assert [row["at"] for row in by_key(found)[b"k0"]] == list(range(0, 20, 2))
    assert sum(row["letter"] is not None for row in found) == 1


@pytest.mark.parametrize(
    ("policy", "first", "rest"),
    [("block", "blocked", "stopped"), ("block_and_dlq", "blocked", "stopped"), ("park", "parked", "parked")],
)
def test_stopped_lane_is_returned_undone_and_in_order(policy: Any, first: str, rest: str) -> None:
    rows = numbered(2_000, 4)
    rows[8]["value"] = b"8!"
    ran: list[int] = []
    app = shop(on_failure=policy, max_buffered=100)

    @app.stage
    async def note(msg: Message) -> bytes:
        ran.append(int(msg.value))
        return bytes(msg.value)

    found = run(app, [batch(rows)])
    lane = by_key(found)[b"k0"]
    assert [row["at"] for row in lane] == list(range(0, 2_000, 4))
    assert [row["outcome"] for row in lane] == ["ok", "ok", first, *[rest] * 497]
    assert [row["letter"] is not None for row in lane] == [False, False, True, *[False] * 497]
    assert [number for number in ran if number % 4 == 0] == [0, 4]
    assert {row["outcome"] for key, rows in by_key(found).items() if key != b"k0" for row in rows} == {"ok"}


def test_rows_without_a_key_do_not_wait() -> None:
    rows = [{"key": None, "value": b"%d%s" % (i, b"!" if i == 3 else b""), "order_0": i} for i in range(10)]
    assert [row["outcome"] for row in run(shop(), [batch(rows)])].count("dead") == 1
    blocked = run(shop(on_failure="block"), [batch(rows)])
    assert sorted(row["outcome"] for row in blocked) == ["blocked", *["ok"] * 9]


def test_message_has_the_position_time_and_headers_of_its_row() -> None:
    seen: list[Any] = []
    app = App("look", source="in", sink="out", retry=QUICK)

    @app.stage
    async def look(msg: Message) -> str:
        seen.append((msg.position, msg.timestamp, msg.headers, msg.event_id, msg.type))
        return msg.request_id

    at = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    row = {
        "key": b"k", "value": b"v", "order_0": 9, "topic": "other", "partition": 5, "offset": 9, "timestamp": at,
        "headers": [{"key": "event-type", "value": b"Paid"}],
    }  # fmt: skip
    types = {
        "topic": pa.string(), "partition": pa.int32(), "offset": pa.int64(),
        "timestamp": pa.timestamp("us", tz="UTC"), "headers": headers,
    }  # fmt: skip
    whole = {"position": True, "topic": True, "timestamp": True, "headers": True, "carried": ()}
    (found,) = run(app, [batch([row], **types)], **whole)
    assert (found["partition"], found["offset"], found["event_id"]) == (5, 9, "other/5/9")
    assert "at" not in found
    milliseconds = int(at.timestamp() * 1000)
    assert seen == [("other/5@9", milliseconds, [("event-type", b"Paid")], "other/5/9", "Paid")]
    (again,) = run(
        app, [batch([{**row, "event_id": b"e1"}], event_id=pa.binary(), **types)], event_id=True, **whole
    )
    assert again["event_id"] == "e1"


def test_order_is_the_event_id_without_a_position() -> None:
    found = run(shop(), [batch(numbered(3, 1))])
    assert [(row["partition"], row["offset"], row["event_id"]) for row in found] == [
        (3, 0, "0"), (3, 1, "1"), (3, 2, "2"),
    ]  # fmt: skip


def test_repeated_event_runs_once() -> None:
    rows = [{**row, "event_id": b"e%d" % (i % 5)} for i, row in enumerate(numbered(10, 1))]
    known = {"event_id": pa.binary()}
    assert [row["outcome"] for row in run(shop(), [batch(rows, **known)], event_id=True)] == [
        *["ok"] * 5, *["duplicate"] * 5,
    ]  # fmt: skip
    narrow = shop(idempotency=Idempotency(count=4))
    assert {row["outcome"] for row in run(narrow, [batch(rows, **known)], event_id=True)} == {"ok"}


def test_rows_with_equal_order_values_are_refused() -> None:
    twice = [{"key": b"a", "value": b"", "order_0": 7}, {"key": b"b", "value": b"", "order_0": 7}]
    assert len(run(shop(), [batch(twice)])) == 2, "rows of different keys may have equal order"
    equal = r"two rows of key b'b' have the same order \(at=7\).*add a column that decides"
    with pytest.raises(SettingsError, match=equal):
        run(shop(), [batch([*twice, twice[1]])])
    with pytest.raises(SettingsError, match=equal):
        run(shop(), [batch(twice), batch(twice[1:])])
    keyless = [{"key": None, "value": b"", "order_0": 7}] * 2
    with pytest.raises(SettingsError, match="two rows of key None"):
        run(shop(), [batch(keyless)])
    placed = [{**row, "partition": 0, "offset": i} for i, row in enumerate(keyless)]
    types = {"partition": pa.int32(), "offset": pa.int64()}
    assert len(run(shop(), [batch(placed, **types)], position=True)) == 2


def test_null_order_is_refused_before_anything_runs() -> None:
    rows = [{"key": b"a", "value": b"", "order_0": None}, *numbered(5, 1)]
    with pytest.raises(SettingsError, match="order_by='at' is null in some rows"):
        run(shop(), [batch(rows)])


def test_offsets_of_two_topics_are_refused() -> None:
    rows = [
        {"key": b"a", "value": b"", "order_0": i, "topic": f"t{i}", "partition": 0, "offset": i}
        for i in range(2)
    ]
    types = {"topic": pa.string(), "partition": pa.int32(), "offset": pa.int64()}
    with pytest.raises(SettingsError, match=r"rows of several topics \(t0, t1\)"):
        run(shop(), [batch(rows, **types)], position=True, topic=True)


def test_stream_rows_are_sorted_by_the_task() -> None:
    rows = numbered(100, 5)
    mixed = [rows[(i * 37) % 100] for i in range(100)]
    found = run(shop(), [batch(mixed[:30]), batch([]), batch(mixed[30:])], stream=True)
    for lane in by_key(found).values():
        assert [row["at"] for row in lane] == sorted(row["at"] for row in lane)
    assert len(found) == 100


def test_no_rows_open_no_resource() -> None:
    app = shop()

    @app.resource
    def never() -> None:
        raise RuntimeError("opened")

    for stream in (True, False):
        assert run(app, [batch([])], stream=stream) == []
    with pytest.raises(ResourceError, match="opened"):
        run(app, [batch(numbered(1, 1))])


def test_read_ahead_is_bounded_by_max_buffered() -> None:
    pulled: list[int] = []
    done = threading.Event()
    app = App("slow", source="in", sink="out", max_buffered=50)

    @app.stage
    async def wait(msg: Message) -> None:
        while not done.is_set():  # noqa: ASYNC110 - it is set by a thread
            await asyncio.sleep(0.01)

    def rows() -> Iterator[pa.RecordBatch]:
        for number in range(0, 1_000, 10):
            pulled.append(number)
            yield batch(numbered(1_000, 1_000)[number : number + 10])

    task = FrameTask(app.spec, plan(), task=0, epoch=0)

    def end() -> None:
        pulled.append(-1)
        done.set()

    threading.Timer(0.5, end).start()
    assert sum(b.num_rows for b in task.run(rows())) == 1_000
    assert pulled.index(-1) <= 6, "read more than fifty rows and one batch ahead"


def test_failure_guard_ends_the_run_with_a_remedy() -> None:
    app = shop(failure_guard=FailureGuard())
    rows = [{**row, "value": b"!"} for row in numbered(1_000, 500)]
    with pytest.raises(
        FailureGuardError, match=r"(in a row|failed for good).*Fix the cause and run the frame again"
    ):
        run(app, [batch(rows)])


def test_reader_that_stops_ends_the_lanes() -> None:
    pulled: list[int] = []

    def rows() -> Iterator[pa.RecordBatch]:
        for at in range(0, 10_000_000, 1_000):
            pulled.append(at)
            yield batch({"key": b"%d" % i, "value": b"", "order_0": i} for i in range(at, at + 1_000))

    reading = FrameTask(shop(max_buffered=5_000).spec, plan(), task=0, epoch=0).run(rows())
    assert next(reading).num_rows >= 8_192
    reading.close()  # type: ignore[attr-defined]
    assert len(pulled) < 100
    assert "keylane-loop" not in {thread.name for thread in threading.enumerate()}


def test_app_without_a_sink_has_no_results() -> None:
    app = App("effects", source="in")

    @app.stage
    async def work(msg: Message) -> object:
        return object()

    (found,) = run(app, [batch(numbered(1, 1))])
    assert (found["outcome"], found["result"]) == ("ok", None)
    kept = App("kept", source="in", commit="epoch")
    kept.stage(shop().spec.stages[0].function)
    (found,) = run(kept, [batch([{"key": b"a", "value": b"x", "order_0": 1}])])
    assert found["result"] == b"X"


def test_batch_stage_runs_over_a_frame_in_order() -> None:
    sizes: list[int] = []
    app = App("scores", source="in", sink="out", retry=QUICK)

    @app.batch_stage(max_size=16)
    async def score(msgs: list[Message]) -> list[Any]:
        sizes.append(len(msgs))
        assert len({msg.key for msg in msgs}) == len(msgs)
        await asyncio.sleep(0.0005)
        return [
            Transient("not yet") if msg.offset % 50 == 7 and msg.attempt == 1 else msg.value for msg in msgs
        ]

    rows = run(app, [batch(numbered(500, 40))])
    assert len(rows) == 500
    for key, found in by_key(rows).items():
        assert [row["result"] for row in found] == [
            row["value"] for row in numbered(500, 40) if row["key"] == key
        ]
    assert max(sizes) == 16
    assert len(sizes) < 120
