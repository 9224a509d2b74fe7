from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane import App, SettingsError, Telemetry
from keylane.engine.latency_sampler import SAMPLES_PER_TICK, LatencySampler
from keylane.histogram import BOUNDS, Histogram
from keylane.kafka.settings import KafkaSettings
from keylane.outcome import Outcome
from keylane.strict_json import MalformedRecordError
from keylane.telemetry.aggregate import Totals
from keylane.telemetry.prometheus import Exporter
from keylane.telemetry.snapshot import HotFigures, decode
from keylane.worker.telemetry_sender import TelemetrySender
from support.snapshots import histogram, snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence


# -- histograms ----------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 10_000)), st.lists(st.floats(0, 10_000)))
def test_histograms_can_be_added_and_subtracted(some: list[float], more: list[float]) -> None:
    both = histogram(*some).plus(histogram(*more))
    assert both.counts == histogram(*some, *more).counts
    assert both.count == len(some) + len(more)
    assert both.sum == pytest.approx(sum(some) + sum(more))
    assert both.minus(histogram(*more)).counts == histogram(*some).counts


@given(st.lists(st.floats(0.001, 5000), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_within_its_bucket(seconds: list[float], q: float) -> None:
    found = histogram(*seconds).quantile(q)
    true = sorted(seconds)[max(0, -(-int(q * len(seconds) * 1000) // 1000) - 1)]
    assert found is not None
    assert found * 2**0.5 >= min(true, BOUNDS[-1])
    assert Histogram().quantile(q) is None


def test_value_at_a_bound_belongs_to_the_bucket_below() -> None:
    assert histogram(BOUNDS[3]).counts[3] == 1
    assert histogram(BOUNDS[-1] * 2).counts[-1] == 1
    assert histogram(-5).counts[0] == 1


# -- records -------------------------------------------------------------------------------------------------------


def test_record_survives_encoding() -> None:
    one = snapshot(
        breakers={"pay": "open"},
        holds={"rate of stage pay": 12},
        latency=histogram(0.01, 0.5),
        hot=(HotFigures(key="k", partition=0, share=0.5, waiting=9),),
    )
    back = decode(one.encode())
    assert back.encode() == one.encode()
    assert back.partitions == one.partitions
    assert back.holds == {"rate of stage pay": 12}
    assert back.latency.counts == one.latency.counts
    assert (back.outcomes, back.partitions[0].lag, back.hot) == (one.outcomes, 15, one.hot)


def test_record_with_additional_fields_is_read() -> None:
    found = json.loads(snapshot().encode())
    found["new"] = 1
    found["lanes"]["new"] = 1
    assert decode(json.dumps(found).encode()).held == 7


@pytest.mark.parametrize(
    "value", [None, b"", b"{}", b"[]", b'"x"', b"\xff", b'{"v": 2}', b'{"v": 1}', b'{"v": 2, "app": null}']
)
def test_malformed_record_is_a_value_error(value: bytes | None) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode(value)


FIELDS = sorted(json.loads(snapshot(hot=(HotFigures(key="k", partition=0, share=0.5, waiting=9),)).encode()))


@pytest.mark.parametrize("value", [None, "x", [], {}, -1, True, 1e999, 2**70, "\ud800"])
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_another_type_is_malformed_or_harmless(name: str, value: Any) -> None:
    found = json.loads(snapshot().encode())
    found[name] = value
    try:
        one = decode(json.dumps(found).encode())
    except MalformedRecordError:
        return
    totals = Totals(since=0.0)
    totals.take([one, one])
    totals.running(one.at + 1)
    made = Exporter(KafkaSettings("b:1"), "chat", "chat.in")
    made._metrics.add_snapshots([one], 0)
    assert made.text()


def test_a_record_is_small() -> None:
    many = {p: replace(snapshot().partitions[0], watermark=p) for p in range(8)}
    busy = histogram(*(0.001 * 1.1**n for n in range(150)))
    assert len(snapshot(partitions=many, latency=busy, processing=busy).encode()) < 3000


# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [0, -1, 0.05, 1e9, "1", True, None])
def test_interval_outside_its_range_is_refused(interval: Any) -> None:
    with pytest.raises(SettingsError, match=r"Telemetry\(interval="):
        Telemetry(interval=interval)


def test_telemetry_is_on_by_default() -> None:
    assert App("a", source="b").spec.telemetry == Telemetry(interval=1.0)
    assert App("a", source="b", telemetry=False).spec.telemetry is None
    assert App("a", source="b", telemetry=Telemetry(interval=5)).spec.telemetry == Telemetry(interval=5)
    with pytest.raises(SettingsError, match="must be True, False or a Telemetry"):
        App("a", source="b", telemetry=2)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="own topic"):
        App("a", source="a.telemetry")


# -- the sample ----------------------------------------------------------------------------------------------------


def deliveries(number: int, took: float = 0.1) -> Sequence[Any]:
    one = SimpleNamespace(redriven=False, started=1000.0, finished=1000.0 + took, timestamp=999_900)
    return [one] * number


def test_few_messages_are_all_measured() -> None:
    meter = LatencySampler()
    for _ in range(10):
        meter.done(deliveries(10))
    assert meter.processing.count == meter.latency.count == 100
    assert meter.latency.sum == pytest.approx(100 * 0.2)


def test_of_many_messages_a_weighted_sample_is_measured() -> None:
    meter = LatencySampler()
    for _ in range(5):
        for _ in range(400):
            meter.done(deliveries(200))
        meter.tick()
    assert meter.stride > 32
    assert meter.latency.count == pytest.approx(5 * 400 * 200, rel=0.05)


def test_small_batches_are_sampled_as_large_ones_are() -> None:
    meter = LatencySampler()
    for number in range(60_000):
        meter.done(deliveries(1))
        if number % 20_000 == 19_999:
            meter.tick()
    assert meter.stride > 8
    assert meter.latency.count == pytest.approx(60_000, rel=0.15)


def test_all_messages_are_measured_after_a_busy_time() -> None:
    meter = LatencySampler()
    meter.done(deliveries(100 * SAMPLES_PER_TICK))
    assert meter.stride > 1
    for _ in range(20):
        meter.tick()
    assert meter.stride == 1


def test_a_redriven_message_and_one_without_a_time_do_not_count() -> None:
    meter = LatencySampler()
    meter.done([SimpleNamespace(redriven=True, started=1.0, finished=2.0, timestamp=1)])  # type: ignore[list-item]
    meter.done([SimpleNamespace(redriven=False, started=0.0, finished=2.0, timestamp=None)])  # type: ignore[list-item]
    assert meter.latency.count == meter.processing.count == 0


# -- totals --------------------------------------------------------------------------------------------------------


def test_lost_records_lose_no_counts() -> None:
    totals = Totals(since=50.0)
    totals.take([snapshot(done=10, dead=0, duplicate=0, at=101.0)])
    totals.take([snapshot(done=90, dead=1, duplicate=0, at=109.0, latency=histogram(1, 2))])
    assert (totals.counters["done"], totals.outcomes[Outcome.OK], totals.outcomes[Outcome.DEAD]) == (
        90,
        89,
        1,
    )
    assert totals.latency.count == 2


def test_a_record_that_comes_twice_or_late_counts_once() -> None:
    totals = Totals(since=50.0)
    early, late = snapshot(done=10, at=101.0), snapshot(done=20, at=102.0)
    totals.take([early, late, early, late])
    assert totals.counters["done"] == 20


def test_tasks_and_epochs_add_up() -> None:
    totals = Totals(since=50.0)
    totals.take(
        [snapshot(life="a", done=10), snapshot(life="b", task=1, done=5), snapshot(life="c", epoch=4, done=1)]
    )
    assert totals.counters["done"] == 16


def test_a_task_that_began_before_counts_from_its_first_record() -> None:
    """A counter that began with everything done before would look like a burst in its rate."""
    totals = Totals(since=500.0)
    totals.take([snapshot(done=1_000_000, at=501.0)])
    assert totals.counters["done"] == 0
    totals.take([snapshot(done=1_000_007, at=502.0)])
    assert totals.counters["done"] == 7


def test_silent_task_does_not_run() -> None:
    totals = Totals(since=50.0)
    totals.take([snapshot(life="a", at=101.0), snapshot(life="b", task=1, at=108.0)])
    assert [one.task for one in totals.running(109.0)] == [0, 1]
    assert [one.task for one in totals.running(112.0)] == [1]
    totals.take([snapshot(life="b", task=1, at=109.0, final=True)])
    assert [one.life for one in totals.running(109.5)] == ["a"]


def test_of_two_runs_the_newer_one_runs() -> None:
    totals = Totals(since=50.0)
    totals.take([snapshot(life="a", run="old", task=1), snapshot(life="b", run="new", began=100.5)])
    assert [one.run for one in totals.running(102.0)] == ["new"]


# -- never disturbs ------------------------------------------------------------------------------------------------


def test_records_are_dropped_without_a_broker(caplog: pytest.LogCaptureFixture) -> None:
    sender = TelemetrySender(KafkaSettings("127.0.0.1:1"), "chat.telemetry")
    began = time.monotonic()
    for _ in range(200):  # more than the client keeps
        sender.send(b"0", snapshot().encode())
    assert time.monotonic() - began < 0.5
    assert sender.dropped >= 100
    assert [r.message for r in caplog.records if "dropping telemetry" in r.message][1:] == []
    assert "dropping telemetry" in caplog.text
    began = time.monotonic()
    sender.close()
    sender.send(b"0", b"late")
    assert time.monotonic() - began < 2


def test_missing_telemetry_client_is_not_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    sender = TelemetrySender(KafkaSettings("127.0.0.1:1", (("no.such.setting", "1"),)), "chat.telemetry")
    sender.send(b"0", b"x")
    sender.serve()
    sender.close()
    assert sender.dropped == 2
    assert caplog.text.count("dropping telemetry") == 1
