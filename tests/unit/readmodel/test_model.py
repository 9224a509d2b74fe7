"""Read models: the table does not depend on the order and repetition of events."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane import App, Field, Message, Poison, ReadModel, ReadModelField, SettingsError
from keylane.testing import Crash, Drain, Harness, MemoryRecord
from support.order_events import ORDERS, as_message, folded, one_event

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PAID = {"OrderPaid": {"paid_at": datetime}}


def stored(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], bytes]:
    """The rows of the view, and the whole table with its ranks as bytes."""
    with ORDERS.sqlite(":memory:") as table:
        for msg in messages:
            table.apply(msg)
        facts = table.read("SELECT * FROM orders_facts ORDER BY order_id")
        return table.rows(), repr(facts).encode()


@settings(max_examples=150)
@given(st.lists(one_event(), max_size=12), st.data())
def test_model_is_the_same_for_any_order_and_repetition(
    events: list[dict[str, Any]], data: st.DataObject
) -> None:
    messages = [as_message(event) for event in events]
    rows, whole = stored(messages)
    replayed = messages + data.draw(
        st.lists(st.sampled_from(messages), max_size=12) if messages else st.just([])
    )
    again, same = stored(data.draw(st.permutations(replayed)))
    assert same == whole, "byte for byte, ranks included"
    assert again == rows
    expected = folded(messages)
    assert rows == [expected[key] for key in sorted(expected, key=str.encode)]
    with ORDERS.sqlite(":memory:") as table:  # all at once, in one transaction
        table.apply(*reversed(replayed))
        assert table.rows() == rows


@settings(max_examples=100)
@given(one_event(), one_event())
def test_equal_ranks_have_equal_values(one: dict[str, Any], other: dict[str, Any]) -> None:
    found = [
        facts for facts in (ORDERS.facts(as_message(event)) for event in (one, other)) if facts is not None
    ]
    if len({facts.type for facts in found}) == 1 and len({facts.rank for facts in found}) == 1:
        assert len({facts.values for facts in found}) == 1


def message(kind: str = "OrderPaid", value: bytes | None = b"{}", **more: Any) -> Message:
    headers = [("event-type", kind.encode()), *more.pop("headers", [])]
    usual: dict[str, Any] = {"topic": "t", "partition": 0, "offset": 0, "key": b"o1", "timestamp": 5}
    return Message(MemoryRecord(value=value, headers=headers, **{**usual, **more}))


def rank(**more: Any) -> str:
    facts = ORDERS.facts(message(**more))
    assert facts is not None
    return facts.rank


def test_rank_goes_by_version_then_time_then_event_id() -> None:
    def version(number: int) -> list[tuple[str, bytes]]:
        return [("event-version", b"%d" % number)]

    ranks = [
        rank(timestamp=0),
        rank(timestamp=7),
        rank(timestamp=7, headers=[("event-id", b"x")]),
        rank(headers=version(0), timestamp=0),
        rank(headers=version(9), timestamp=0),
        rank(headers=version(10), timestamp=0),
        rank(headers=version(10), timestamp=1),
    ]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == len(ranks)


def test_fields_of_an_event_are_written_together() -> None:
    first = message("OrderPlaced", b'{"total": 5, "address": {"city": "Bonn"}}', timestamp=1)
    later = message("OrderPlaced", b'{"total": 6}', timestamp=2)
    for order in ([first, later], [later, first]):
        ((row,), _) = stored(order)
        assert (row["total"], row["city"]) == (6, None)


def test_model_status_is_the_latest_then_the_last_declared() -> None:
    def status(**times: int) -> str:
        kinds = {"placed": "OrderPlaced", "paid": "OrderPaid", "shipped": "order.shipped"}
        ((row,), _) = stored([message(kinds[state], timestamp=at) for state, at in times.items()])
        return str(row["status"])

    assert status(shipped=3, placed=1) == "shipped"
    assert status(shipped=3, placed=1, paid=4) == "paid"
    assert status(paid=2, placed=2) == "paid"
    assert status(placed=2) == "placed"


def test_status_may_be_an_sql_expression() -> None:
    model = ReadModel("o", fields=PAID, status="CASE WHEN paid_at IS NULL THEN 'open' ELSE 'closed' END")
    with model.sqlite(":memory:") as table:
        table.apply(message())
        assert table.rows() == [
            {"key": "o1", "paid_at": datetime(1970, 1, 1, 0, 0, 0, 5000, tzinfo=UTC), "status": "closed"}
        ]


def test_type_version_and_time_may_be_in_the_value() -> None:
    model = ReadModel(
        "o", fields=PAID, event_type=Field("meta.type"), version=Field("meta.version"), time=Field("at")
    )
    value = b'{"meta": {"type": "OrderPaid", "version": 3}, "at": "2026-01-31T13:00:00+01:00"}'
    facts = model.facts(message("x", value))
    assert facts is not None
    assert facts.values == (datetime(2026, 1, 31, 12, tzinfo=UTC),)
    assert facts.rank.startswith("0000000000000000003 ")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"key": None}, "OrderPlaced without a key"),
        ({"key": b"\xff"}, r"OrderPlaced: the key b'\\xff' is not UTF-8"),
        ({"value": b"{"}, "OrderPlaced: the value is not JSON"),
        ({"value": b'{"total": "5"}'}, "OrderPlaced: total: '5' is not a whole number of 64 bits"),
        ({"value": b'{"total": true}'}, "OrderPlaced: total: True is not a whole number"),
        ({"value": b'{"total": 9223372036854775808}'}, "is not a whole number of 64 bits"),
        ({"value": b'{"address": {"city": 5}}'}, "OrderPlaced: address.city: 5 is not text"),
        ({"value": b'{"address": {"city": "\\ud800"}}'}, "address.city: .* is not text"),
        ({"kind": "OrderPaid", "value": b'{"amount": NaN}'}, "OrderPaid: amount: nan is not a number"),
        ({"kind": "OrderPaid", "value": b'{"partly": 1}'}, "OrderPaid: partly: 1 is not true or false"),
        ({"kind": "order.shipped", "value": b'{"due": "2026-01-31T12:00:00"}'}, "due: .* is not a time with a zone"),
        ({"kind": "order.shipped", "value": b'{"due": 5}'}, "due: 5 is not a time with a zone"),
        ({"timestamp": None}, "OrderPlaced: placed_at: the event has no time"),
        ({"headers": [("event-version", b"new")]}, "OrderPlaced: expected the version to be a whole number"),
    ],
)  # fmt: skip
def test_model_poison_names_the_field_that_does_not_fit(given: dict[str, Any], why: str) -> None:
    with pytest.raises(Poison, match=why):
        ORDERS.facts(message(**{"kind": "OrderPlaced", **given}))


def test_events_of_other_types_are_ignored() -> None:
    assert ORDERS.facts(message("Chatter", b"no json", key=None)) is None
    assert ORDERS.facts(Message(MemoryRecord(topic="t", partition=0, offset=0, key=b"k", value=b""))) is None


def test_tombstone_writes_only_the_time() -> None:
    ((row,), _) = stored([message("OrderPlaced", None)])
    assert (row["total"], row["placed_at"]) == (None, datetime(1970, 1, 1, 0, 0, 0, 5000, tzinfo=UTC))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"name": "my orders"}, "name='my orders' cannot name a table"),
        ({"key": "_id"}, "key='_id' cannot name a table or column"),
        ({"fields": {}}, "fields must name what each event type writes"),
        ({"fields": {"A": {}}}, "'A' must write at least one field"),
        ({"fields": {"A": {"_x": int}}}, "field='_x' cannot name"),
        ({"fields": {"A": {"x": list}}}, "the field 'x' of 'A' must be int, .* got <class 'list'>"),
        ({"fields": {"A": {"x": int}, "B": {"X": int}}}, "the field 'X' of 'B' already belongs to 'A'"),
        ({"fields": {"A": {"x": int}, "a": {"y": int}}}, "'A' and 'a' differ only in upper and lower case"),
        ({"fields": {"A": {"status": int}}}, "the field 'status' of 'A' already belongs to the status"),
        ({"fields": {"A": {"key": int}}}, "the field 'key' of 'A' already belongs to the key"),
        (
            {"status": {"paid": "payed_at"}},
            "needs a time of the model, got 'payed_at'; did you mean 'paid_at'",
        ),
        ({"status": {}}, "status must be states by time .* got {}; write status="),
        ({"status": {"a": "paid_at", "b": "paid_at"}}, "every state needs a time of its own"),
        ({"event_type": ""}, "event_type must be the name of a header .* got ''"),
        ({"time": "at"}, r"write time=Field\('at'\)"),
    ],
)
def test_model_with_wrong_settings_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        ReadModel(**{"name": "orders", "fields": PAID, **given})


def test_field_with_an_empty_name_is_refused() -> None:
    with pytest.raises(SettingsError, match="expected the name of a field"):
        ReadModelField(int, "a..b")


def test_model_refuses_the_file_of_another_model(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    with ReadModel("orders", fields=PAID).sqlite(path) as table:
        table.apply(message())
    with pytest.raises(
        SettingsError, match="has the columns key, paid_at, _OrderPaid, and the model has order_id"
    ):
        ORDERS.sqlite(path)
    with ReadModel("orders", fields=PAID, status={"it's paid": "paid_at"}).sqlite(path) as table:
        assert [row["status"] for row in table.rows()] == ["it's paid"]


def test_sqlite_applies_all_events_or_none(tmp_path: Path) -> None:
    with ORDERS.sqlite(tmp_path / "orders.db") as table:
        with pytest.raises(Poison):
            table.apply(message(), message(value=b"{"))
        assert table.rows() == []
        with sqlite3.connect(tmp_path / "orders.db") as other:
            other.execute("BEGIN IMMEDIATE")
            table._connection.execute("PRAGMA busy_timeout = 10")
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                table.apply(message())
            other.rollback()
        assert table.apply(message(), message("Chatter")) == 1
        other.close()


def test_sqlite_file_is_shared_by_tasks(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"

    def work(task: int) -> None:
        with ORDERS.sqlite(path) as table:
            for number in range(40):
                table.apply(message(key=b"o%d" % (number % 8), timestamp=number * 4 + task))

    threads = [threading.Thread(target=work, args=(task,)) for task in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    with ORDERS.sqlite(path) as table:
        latest = [(row["paid_at"].timestamp() * 1000, row["order_id"]) for row in table.rows()]
    assert latest == [((32 + number) * 4 + 3, f"o{number}") for number in range(8)]


def test_model_in_a_handler_survives_crashes(tmp_path: Path) -> None:
    app = App("shop", source="in", unhandled="ignore", commit_interval=0.01)

    @app.resource
    def orders() -> Any:
        with ORDERS.sqlite(tmp_path / "orders.db") as table:
            yield table

    @app.on(*ORDERS.fields)
    async def keep(msg: Message, orders: Any) -> None:
        await asyncio.sleep(0.003)
        orders.apply(msg)

    run = Harness(app, partitions=2, seed=1, faults=[Crash(at=0.02), Drain(at=0.03), Crash(at=0.041)])
    sent = []
    for number in range(60):
        kind = [*ORDERS.fields, "Chatter"][number % 4]
        value = b'{"total": "x"}' if number == 4 else b'{"total": %d}' % number  # one malformed OrderPlaced
        headers = [("event-type", kind.encode())]
        run.send(key=b"o%d" % (number % 5), value=value, headers=headers, at=number / 1000)
        if number != 4:
            sent.append(message(kind, value, key=b"o%d" % (number % 5), timestamp=number))
    result = run.run()
    result.verdict.raise_if_bad()
    assert result.verdict.repeats > 0, "the crashes interrupted nothing"
    assert [letter.message for letter in result.dead] == [
        "OrderPlaced: total: 'x' is not a whole number of 64 bits"
    ]
    with ORDERS.sqlite(tmp_path / "orders.db") as table:
        expected = folded(sent)
        assert table.rows() == [expected[key] for key in sorted(expected)]
