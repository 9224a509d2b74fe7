"""Lanes by a header or a field of the value, as a user declares them."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
from typing import TYPE_CHECKING, Any

import pytest

from keylane import (
    App,
    ByField,
    ByHeader,
    Idempotency,
    Ledger,
    Message,
    Ordering,
    Poison,
    Retry,
    SettingsError,
    Transient,
    VersionOrdering,
)
from keylane.audit.violation import Flaw
from keylane.lanes.ordering import KEY, ORDERINGS
from keylane.testing import Crash, Drain, Harness, Recut, Redrive, Release, check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.testing import Fault, RunResult

pytestmark = pytest.mark.usefixtures("quiet")

TENANTS = ("acme", "blue", "cyan")
ORDERS = [ByHeader("tenant"), ByField("customer.id")]


def run(order: Ordering, seed: int, faults: Sequence[Fault] = (), *, bad: str = "", **more: Any) -> RunResult:
    """Many keys, three tenants, two partitions; a stage of 5 to 30 ms that fails now and then."""
    rng = random.Random(seed)
    app = App("app", source="in", sink="out", order=order, retry=Retry(wait_initial=0.01), **more)

    @app.stage
    async def stage(msg: Message) -> bytes:
        await asyncio.sleep(0.005 + rng.random() * 0.025)
        if json.loads(msg.value)["id"] == bad and asyncio.get_running_loop().time() < 5:
            raise Poison("bad")
        if msg.attempt == 1 and rng.random() < 0.1:
            raise Transient("not yet")
        return bytes(msg.value)

    harness = Harness(app, faults=faults, seed=seed, partitions=2)
    for number in range(90):
        tenant = TENANTS[number % 3]
        harness.send(
            {"id": f"{tenant}-{number}", "customer": {"id": tenant}},
            key=b"k%d" % rng.randrange(20),
            headers={"tenant": tenant},
            at=number * 0.02,
        )
    return harness.run()


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_lanes_by_content_keep_order_over_crashes(order: Ordering, seed: int) -> None:
    rng = random.Random(seed)
    faults: list[Fault] = [Crash(at=0.1 + rng.random()), Drain(at=1.2 + rng.random()), Crash(at=2.5)]
    result = run(order, seed, faults)
    result.verdict.raise_if_bad()
    assert len({written.value for written in result.results}) == 90


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_tenant_runs_one_message_at_a_time_per_partition(order: Ordering) -> None:
    result = run(order, 1)
    events = result.history.events
    open_ = most = 0
    for event in events:
        open_ += 1 if event.kind == "start" else -1
        most = max(most, open_)
    assert 2 < most <= 6, "three tenants in two partitions"


def test_the_checker_needs_the_lanes_it_cannot_see() -> None:
    result = run(ByHeader("tenant"), 1)
    with pytest.raises(ValueError, match="needs lanes"):
        check(result.history, sent={}, order=ByHeader("tenant"))


def test_the_checker_finds_an_overtaken_header_lane() -> None:
    result = run("none", 1)  # type: ignore[arg-type]  # any name is an ordering
    sent = {(e.partition, e.offset): e.key for e in result.history.events}
    one_lane = {place: b"%d/acme" % place[0] for place in sent}
    verdict = check(result.history, sent=sent, order=ByHeader("tenant"), lanes=one_lane)
    assert verdict.tally[Flaw.ORDER]
    assert verdict.tally[Flaw.OVERLAP]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_blocked_tenant_waits_until_it_is_released(order: Ordering) -> None:
    place = next(
        (r.partition, r.offset)
        for r in run(order, 2).results
        if json.loads(r.value or b"")["id"] == "acme-30"
    )
    name = b'%d/"acme"' if isinstance(order, ByField) else b"%d/acme"
    release = Release(at=8.0, key=name % place[0])
    result = run(order, 2, [Crash(at=3.0), Drain(at=6.0), release], bad="acme-30", on_failure="block")
    result.verdict.raise_if_bad()
    assert len({written.value for written in result.results}) == 90
    assert result.elapsed > 8


def test_a_repeated_event_is_found_in_its_own_lane_only() -> None:
    app = App("app", source="in", sink="out", order=ByHeader("tenant"), idempotency=Idempotency())

    @app.stage
    async def stage(msg: Message) -> bytes:
        return bytes(msg.value)

    harness = Harness(app, partitions=1)
    for value, tenant, event in [
        ("one", "acme", "e1"),
        ("again", "acme", "e1"),
        ("two", "acme", "e2"),
        ("other", "blue", "e1"),
    ]:
        harness.send(value, key="k", headers={"tenant": tenant, "event-id": event})
    result = harness.run()
    result.verdict.raise_if_bad()
    assert sorted(written.value or b"" for written in result.results) == [b"one", b"other", b"two"]
    assert len(result.duplicates) == 1


@pytest.mark.parametrize(
    ("value", "lane"),
    [
        (b'{"customer": {"id": 7}}', b"0/7"),
        (b'{"customer": {"id": "7"}}', b'0/"7"'),
        (b'{"customer": {"id": null}}', None),
        (b'{"customer": 3}', None),
        (b"[]", None),
        (b"not json", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
        (None, None),
    ],
)
def test_a_field_that_cannot_be_read_has_no_lane(value: bytes | None, lane: bytes | None) -> None:
    harness = Harness(_app())
    record = harness.log.append("in", key=b"k", value=value, headers=[], timestamp=0, partition=0)
    assert ByField("customer.id").lane_key(Message(record)) == lane


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"on_failure": "park"}, "on_failure='park' puts the lane of a key aside"),
        ({"versions": VersionOrdering()}, "versions= needs order='key'"),
        ({"ledger": Ledger()}, "ledger= does not work with order=ByHeader"),
    ],
)
def test_options_that_need_lanes_of_keys_are_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        App("app", source="in", order=ByHeader("tenant"), **more)


def test_unknown_ordering_is_refused() -> None:
    with pytest.raises(SettingsError, match="order must be 'key'"):
        App("app", source="in", order="keys")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="expected the name of a header"):
        ByHeader("")
    with pytest.raises(SettingsError, match=r"field\.in\.field"):
        ByField("a..b")


class Splits(Ordering):
    """Claims what lanes by content cannot have."""

    splittable = True


def test_an_ordering_that_shares_partitions_unsoundly_is_refused() -> None:
    with pytest.raises(SettingsError, match="splittable and by_key must be False"):
        App("app", source="in", order=Splits())


@pytest.mark.parametrize("fault", [Recut(at=1, tasks=2), Redrive(at=1, key=b"k")], ids=["recut", "redrive"])
def test_the_harness_refuses_faults_that_cannot_happen(fault: Fault) -> None:
    with pytest.raises(SettingsError, match="order=ByHeader"):
        Harness(_app(), faults=[fault])


class Broken(Ordering):
    """Cannot tell the lane."""

    def lane_value(self, message: Message) -> bytes:
        raise RuntimeError(f"no idea about {message.offset}")


def test_an_ordering_that_raises_stops_the_task() -> None:
    app = App("app", source="in", order=Broken())
    app.stage(_nothing)
    harness = Harness(app)
    harness.send("x", key="k")
    with pytest.raises(Exception, match="cannot tell a message's lane"):
        harness.run()


def test_named_orderings_stay_themselves_when_pickled() -> None:
    assert all(pickle.loads(pickle.dumps(one)) is one for one in ORDERINGS.values())  # noqa: S301
    assert App("a", source="in").spec.order is KEY


def test_a_whole_partition_keeps_the_slots_of_its_keys() -> None:
    keyed, whole = App("a", source="in").spec, App("a", source="in", order="partition").spec
    assert whole.slot_of(b"k", 5) == keyed.slot_of(b"k", 5) == whole.slot_of(b"k", 6)


def _app() -> App:
    app = App("app", source="in", order=ByHeader("tenant"))
    app.stage(_nothing)
    return app


async def _nothing(_msg: Message) -> None:
    pass


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_evicted_messages_come_back_into_their_tenants_lane(order: Ordering) -> None:
    app = App(
        "app", source="in", sink="out", order=order, max_buffered=200, retry=Retry(wait_initial=5, wait_max=5)
    )

    @app.stage
    async def stage(msg: Message) -> bytes:
        if msg.offset == 0 and msg.attempt < 4:
            raise Transient("not yet")
        return bytes(msg.value)

    harness = Harness(app, partitions=1)
    for number in range(600):
        tenant = "acme" if number < 500 else "blue"
        harness.send(
            {"n": number, "customer": {"id": tenant}},
            key=b"k%d" % number,
            headers={"tenant": tenant},
            at=number * 0.01,
        )
    result = harness.run()
    result.verdict.raise_if_bad()
    assert len(result.results) == 600
