"""Offsets read again behind the fetcher's back, from a real broker."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException, Producer, TopicPartition
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.broker import Broker
from keylane.errors import BrokerError, SettingsError
from keylane.kafka.partition_reader import PartitionReader
from keylane.kafka.settings import KafkaSettings
from keylane.worker import refetch as refetch_module
from keylane.worker.refetch import Refetched, RefetchReader
from support.topics import Log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

pytestmark = pytest.mark.timeout(60)

MESSAGES = 20_000
PARTITIONS = 3


class Caller:
    """Makes requests, and gathers what comes on the reader's thread."""

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        self.parts: dict[int, list[Refetched]] = {}
        self.errors: list[BaseException] = []
        self.asked: dict[int, list[int]] = {}
        self._came = threading.Condition()
        self.refetcher = RefetchReader(settings, "rereader-test", topic, deliver=self.deliver, fail=self.fail)

    def deliver(self, part: Refetched) -> None:
        with self._came:
            self.parts.setdefault(part.ticket, []).append(part)
            self._came.notify()

    def fail(self, error: BaseException) -> None:
        with self._came:
            self.errors.append(error)
            self._came.notify()

    def ask(self, ticket: int, partition: int, offsets: Sequence[int]) -> None:
        self.asked[ticket] = list(offsets)
        self.refetcher.request(ticket, partition, offsets)

    def complete(self, ticket: int) -> bool:
        return ticket in self.parts and self.parts[ticket][-1].last

    def wait(self, *tickets: int, timeout: float = 30.0) -> None:
        with self._came:
            came = self._came.wait_for(
                lambda: self.errors or all(map(self.complete, tickets or self.asked)), timeout
            )
        assert not self.errors, self.errors
        assert came, f"{sum(map(self.complete, self.asked))} of {len(self.asked)} tickets came"

    def check(self, ticket: int, partition: int, gone: set[int] | frozenset[int] = frozenset()) -> None:
        """Everything came once, in order from part to part, each with its kind."""
        floor = -1
        records: list[int] = []
        missing: list[int] = []
        for part in self.parts[ticket]:
            assert part.partition == partition
            found = [record.offset() for record in part.records]
            for record in part.records:
                assert record.partition() == partition
                assert record.value() == b"%d" % record.offset()
            for offsets in (found, part.missing):
                assert list(offsets) == sorted(set(offsets))
            here = sorted([*found, *part.missing])
            assert here, "no part is empty"
            assert here[0] > floor
            floor = here[-1]
            records += found
            missing += part.missing
        assert [part.last for part in self.parts[ticket]] == [False] * (len(self.parts[ticket]) - 1) + [True]
        assert records == [offset for offset in self.asked[ticket] if offset not in gone]
        assert missing == [offset for offset in self.asked[ticket] if offset in gone]


def numbered(log: Log, topic: str, count: int, partitions: int, size: int = 0) -> None:
    """As many messages in each partition; each one's value is its offset."""
    log.send(
        topic,
        (
            {
                "partition": n % partitions,
                "key": b"%d" % (n % 1000),
                "value": b"%d" % (n // partitions) + b"x" * size,
            }
            for n in range(count)
        ),
    )


@pytest.fixture(scope="module")
def topic(log: Log) -> str:
    log.create("rereader.in", partitions=PARTITIONS)
    numbered(log, "rereader.in", MESSAGES, PARTITIONS)
    return "rereader.in"


@pytest.fixture
def callers(log: Log) -> Iterator[Callable[..., Caller]]:
    made: list[Caller] = []

    def make(topic: str, **extra: str) -> Caller:
        made.append(Caller(KafkaSettings(log.bootstrap, tuple(extra.items())), topic))
        return made[-1]

    yield make
    for caller in made:
        caller.refetcher.close()


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "keylane-rereader"]


def test_exactly_the_offsets_asked_for_come_in_order(callers: Callable[..., Caller], topic: str) -> None:
    caller = callers(topic)
    assert not alive(), "without a request there is no thread"
    rng = random.Random(1)
    caller.ask(1, 0, sorted(rng.sample(range(6000), 300)))
    caller.ask(2, 1, [0])
    caller.ask(3, 2, range(6000, 6600, 7))
    caller.ask(4, 1, [6665])
    caller.wait()
    for ticket, partition in ((1, 0), (2, 1), (3, 2), (4, 1)):
        caller.check(ticket, partition)
    caller.ask(5, 0, [2, 5, 9])  # after a pause, and behind
    caller.wait()
    caller.check(5, 0)
    caller.ask(6, 1, [])
    caller.wait()
    assert [(list(p.records), list(p.missing), p.last) for p in caller.parts[6]] == [([], [], True)]
    assert caller.refetcher.open == 0


def test_overlapping_requests_share_one_pass(callers: Callable[..., Caller], topic: str) -> None:
    caller = callers(topic)
    partition_of = {ticket: ticket % PARTITIONS for ticket in range(50)}
    # Lanes as in a real log: every key has a few thousandths of it, spread all over it.
    for ticket, partition in partition_of.items():
        rng = random.Random(ticket)
        caller.ask(ticket, partition, sorted(rng.sample(range(ticket, 6600), 100)))
    caller.wait()
    for ticket, partition in partition_of.items():
        caller.check(ticket, partition)
    # Those that came after the pass had begun, and before its place, needed one more.
    assert caller.refetcher.scanned < 2.5 * MESSAGES


def test_many_lanes_in_slices_read_the_log_about_once(callers: Callable[..., Caller], topic: str) -> None:
    caller = callers(topic)
    lanes = {lane: list(range(lane, 6600, 20)) for lane in range(20)}
    ticket = 0
    for place in range(0, 330, 110):
        for lane in lanes.values():
            ticket += 1
            caller.ask(ticket, 1, lane[place : place + 110])
        caller.wait()
    for number in range(1, ticket + 1):
        caller.check(number, 1)
    assert caller.refetcher.scanned < 6 * 6600, "and not sixty times"


def test_the_same_offset_for_two_tickets_comes_to_both(callers: Callable[..., Caller], topic: str) -> None:
    caller = callers(topic)
    caller.ask(1, 0, [5, 6, 7])
    caller.ask(2, 0, [6, 7, 8])
    caller.wait()
    caller.check(1, 0)
    caller.check(2, 0)


def test_a_request_far_behind_is_served_before_a_long_pass_ends(
    callers: Callable[..., Caller], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refetch_module, "_TURN_MESSAGES_MAX", 500)
    monkeypatch.setattr(refetch_module, "_BATCH_MESSAGES", 50)
    caller = callers(topic)
    served: list[int] = []
    deliver = caller.deliver

    def slowly(part: Refetched) -> None:
        if part.ticket == 1 and len(caller.parts.get(1, [])) == 5:
            caller.ask(2, 0, range(100))
        served.append(part.ticket)
        deliver(part)

    caller.refetcher._deliver = slowly
    caller.ask(1, 0, range(6600))
    caller.wait(1, timeout=30)
    caller.wait()
    caller.check(1, 0)
    caller.check(2, 0)
    assert 1 in served[served.index(2) :], "the first went on after it"


def test_offsets_deleted_by_retention_are_missing(
    callers: Callable[..., Caller], log: Log, name: str
) -> None:
    log.create(name, partitions=1)
    numbered(log, name, 3000, 1)
    admin: Any = log.settings.admin()
    for future in admin.delete_records([TopicPartition(name, 0, 1000)]).values():
        future.result()
    caller = callers(name)
    gone = frozenset(range(1000))
    caller.ask(1, 0, [3, 500, 999, 1000, 1001, 2999])
    caller.ask(2, 0, [7, 8])
    caller.ask(3, 0, [2000])
    caller.wait()
    for ticket in (1, 2, 3):
        caller.check(ticket, 0, gone)
    caller.ask(4, 0, [10])
    caller.wait()
    caller.check(4, 0, gone)


def test_markers_and_aborted_messages_are_missing(
    callers: Callable[..., Caller], log: Log, name: str
) -> None:
    log.create(name, partitions=1)
    producer: Any = Producer({"bootstrap.servers": log.bootstrap, "transactional.id": name})
    producer.init_transactions()
    at = 0
    gone: set[int] = set()
    for commit in (True, False, True, True, False):
        producer.begin_transaction()
        for _ in range(100):
            producer.produce(name, b"%d" % at)
            if not commit:
                gone.add(at)
            at += 1
        producer.flush()
        if commit:
            producer.commit_transaction()
        else:
            producer.abort_transaction()
        gone.add(at)  # the marker
        at += 1
    caller = callers(name)
    caller.ask(1, 0, range(at))
    caller.ask(2, 0, [at - 1])  # nothing but the end of the log comes after it
    caller.ask(3, 0, [100, 150, 250, 403])
    caller.wait()
    for ticket in (1, 2, 3):
        caller.check(ticket, 0, gone)


def test_a_log_that_ends_too_soon_is_believed_after_a_while(
    callers: Callable[..., Caller], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = callers(topic)
    caller.ask(1, 2, [6665, 70_000, 80_000])
    time.sleep(2)
    assert not caller.complete(1), "a broker that has just become the leader may know less for a while"
    monkeypatch.setattr(refetch_module, "_MISSING_SECONDS", 0.5)
    caller.wait()
    caller.check(1, 2, {70_000, 80_000})


def test_a_cancelled_ticket_ends_and_the_others_do_not(callers: Callable[..., Caller], topic: str) -> None:
    caller = callers(topic)
    deliver = caller.deliver

    def cancelling(part: Refetched) -> None:
        deliver(part)
        caller.refetcher.cancel(1)

    caller.refetcher._deliver = cancelling
    caller.ask(1, 0, range(6600))
    caller.ask(2, 0, range(0, 6600, 2))
    caller.wait(2)
    caller.check(2, 0)
    assert not caller.complete(1)
    caller.refetcher.cancel(1)
    caller.refetcher.cancel(99)
    caller.ask(3, 0, [1])
    caller.wait(3)
    assert caller.refetcher.open == 0


def test_it_closes_promptly_whatever_it_does(callers: Callable[..., Caller], topic: str) -> None:
    idle, never, busy = callers(topic), callers(topic), callers(topic)
    idle.ask(1, 0, [1])
    idle.wait()
    busy.ask(1, 0, [70_000])
    time.sleep(0.3)
    for caller in (idle, never, busy):
        began = time.monotonic()
        caller.refetcher.close()
        assert time.monotonic() - began < 2
    assert not alive()
    idle.refetcher.request(2, 0, [1])
    assert not alive(), "closed is closed"


def test_prefetching_stops_without_requests(
    callers: Callable[..., Caller], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refetch_module, "_IDLE_SECONDS", 0.1)
    caller = callers(topic)
    caller.ask(1, 0, [1])
    caller.wait()
    deadline = time.monotonic() + 10
    while caller.refetcher._parts[0].position is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert caller.refetcher._parts[0].position is None
    caller.ask(2, 0, [5])
    caller.wait()
    caller.check(2, 0)


def test_a_topic_that_was_deleted_is_an_error(
    callers: Callable[..., Caller], log: Log, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refetch_module, "_MISSING_SECONDS", 0.5)
    monkeypatch.setattr(refetch_module, "_SILENT_SECONDS", 1.0)
    log.create(name, partitions=1)
    numbered(log, name, 10, 1)
    caller = callers(name, **{"topic.metadata.propagation.max.ms": "500"})
    caller.ask(1, 0, [1])
    caller.wait()
    admin: Any = log.settings.admin()
    for future in admin.delete_topics([name]).values():
        future.result()
    while name in log.cluster.topics():
        time.sleep(0.05)
    caller.ask(2, 0, [2])
    with pytest.raises(AssertionError, match="cannot be read again"):
        caller.wait()
    assert isinstance(caller.errors[0], BrokerError)
    assert name in str(caller.errors[0])


def test_settings_the_client_refuses_are_an_error() -> None:
    errors: list[BaseException] = []
    odd = KafkaSettings("127.0.0.1:1", (("no.such.setting", "1"),))
    refetcher = RefetchReader(odd, "app", "topic", deliver=lambda _: None, fail=errors.append)
    refetcher.request(1, 0, [1])
    refetcher.close()
    assert isinstance(errors[0], SettingsError)


@pytest.mark.slow
def test_an_outage_is_waited_out(log: Log, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refetch_module, "_BATCH_MESSAGES", 50)
    with Broker() as own:
        there = Log(own.bootstrap)
        there.create(name, partitions=PARTITIONS)
        numbered(there, name, MESSAGES, PARTITIONS)
        caller = Caller(there.settings, name)
        begun, go_on = threading.Event(), threading.Event()
        deliver = caller.deliver

        def slowly(part: Refetched) -> None:
            deliver(part)
            begun.set()
            go_on.wait(30)

        caller.refetcher._deliver = slowly
        try:
            for partition in range(PARTITIONS):
                caller.ask(partition, partition, range(0, 6600, 2))
            assert begun.wait(30)
            own.nodes[0].stop()
            go_on.set()
            caller.ask(10, 0, range(1000))
            time.sleep(1)
            own.nodes[0].start()
            caller.wait()
        finally:
            go_on.set()
            caller.refetcher.close()
    for ticket in (0, 1, 2, 10):
        caller.check(ticket, ticket % 10)


# Without a broker: whatever the client may do.


class Seen:
    """A message, or the end of a partition, as the client hands it out."""

    def __init__(self, partition: int, offset: int, *, end: bool = False) -> None:
        self._partition = partition
        self._offset = offset
        self._end = end

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def error(self) -> ClientError | None:
        return ClientError(ClientError._PARTITION_EOF) if self._end else None

    def value(self) -> bytes:
        return b"%d" % self._offset


class UnreliableConsumer:
    """Logs with holes, and a client that sometimes returns what it had fetched at its former position."""

    def __init__(self, logs: list[list[int]], ends: list[int], rng: random.Random) -> None:
        self.logs = logs
        self.ends = ends
        self.rng = rng
        self.at: dict[int, int] = {}
        self.said_end: set[int] = set()
        self.stale: list[Seen] = []
        self.tricked: set[int] = set()

    def _sent(self, place: TopicPartition) -> None:
        number = place.partition
        self._forget(number)
        # Not twice in a row, and nothing of longer ago: so far the client can be trusted.
        if number in self.at and number not in self.tricked and self.rng.random() < 0.3:
            self.tricked.add(number)
            after, some = self._after(number), self.rng.randint(0, 3)
            self.stale += [Seen(number, offset) for offset in after[:some]]
            if len(after) <= some:
                self.stale.append(Seen(number, self.ends[number], end=True))
        else:
            self.tricked.discard(number)
        self.at[number] = place.offset
        self.said_end.discard(number)

    def _forget(self, number: int) -> None:
        self.stale = [seen for seen in self.stale if seen.partition() != number]

    def _after(self, number: int) -> list[int]:
        return [offset for offset in self.logs[number] if offset >= self.at[number]]

    def incremental_assign(self, places: list[TopicPartition]) -> None:
        for place in places:
            self._sent(place)

    def incremental_unassign(self, places: list[TopicPartition]) -> None:
        for place in places:
            del self.at[place.partition]
            self._forget(place.partition)

    def seek(self, place: TopicPartition) -> None:
        if self.rng.random() < 0.1:
            raise KafkaException(ClientError(ClientError._STATE))
        self._sent(place)

    def poll(self, timeout: float) -> Seen | None:
        return next(iter(self.consume(1, 0)), None)

    def consume(self, count: int, timeout: float) -> list[Seen]:
        out, self.stale = self.stale[:count], self.stale[count:]
        for number in self.rng.sample(sorted(self.at), len(self.at)):
            after = self._after(number)[: max(0, min(count - len(out), self.rng.randint(1, 9)))]
            out += [Seen(number, offset) for offset in after]
            if after:
                self.at[number] = after[-1] + 1
            if len(out) < count and not self._after(number) and number not in self.said_end:
                self.said_end.add(number)
                out.append(Seen(number, self.ends[number], end=True))
        return out


@given(st.data(), st.integers())
@settings(max_examples=300, deadline=None)
def test_refetch_delivers_each_offset_once_in_order(data: st.DataObject, seed: int) -> None:
    rng = random.Random(seed)
    logs = [sorted(rng.sample(range(200), rng.randint(0, 200))) for _ in range(2)]
    consumer: Any = UnreliableConsumer(logs, [201, 201], rng)
    caller = Caller(KafkaSettings("nowhere"), "topic")
    refetcher = caller.refetcher
    refetcher._thread = threading.current_thread()  # this one drives it
    refetcher._reader = PartitionReader(consumer, "topic")
    partition_of: dict[int, int] = {}
    cancelled: set[int] = set()
    with (
        mock.patch.object(refetch_module, "_LEAP_OFFSETS_MIN", 20),
        mock.patch.object(refetch_module, "_TURN_MESSAGES_MAX", 30),
        mock.patch.object(refetch_module, "_BATCH_MESSAGES", 8),
        mock.patch.object(refetch_module, "_IDLE_SECONDS", 0.0),
        mock.patch.object(refetch_module, "_MISSING_SECONDS", -1.0),
    ):
        for ticket in range(data.draw(st.integers(1, 12))):
            partition_of[ticket] = data.draw(st.integers(0, 1))
            offsets = data.draw(
                st.sets(st.integers(0, 205), min_size=1, max_size=data.draw(st.integers(1, 60)))
            )
            caller.ask(ticket, partition_of[ticket], sorted(offsets))
            for _ in range(data.draw(st.integers(0, 12))):
                if refetcher.open or not refetcher._queue.empty():
                    refetcher._step(consumer)
            if data.draw(st.integers(0, 9)) == 0 and not caller.complete(ticket):
                refetcher.cancel(ticket)
                cancelled.add(ticket)
        steps = 0
        while refetcher.open or not refetcher._queue.empty():
            if not any(part.asked or part.late for part in refetcher._parts.values()):
                refetcher._queue.put(-1)  # an unknown ticket: not to wait for the next one
            refetcher._step(consumer)
            steps += 1
            assert steps < 1000
    assert not caller.errors
    for ticket, partition in partition_of.items():
        if ticket not in cancelled:
            caller.check(ticket, partition, frozenset(range(206)) - set(logs[partition]))


def test_how_fast_it_is(callers: Callable[..., Caller], log: Log, name: str) -> None:
    """Printed, not judged: ``pytest -s``."""
    count = 100_000
    log.create(name, partitions=1)
    numbered(log, name, count, 1, size=100)
    for what, offsets in (
        ("every 11th of 100,000", range(0, count, 11)),
        ("all of 100,000", range(count)),
        ("4, far apart", [10, 30_100, 60_200, 99_000]),
    ):
        caller = callers(name)
        caller.ask(0, 0, [count - 1])  # connected, and nothing beyond it prefetched
        caller.wait()
        scanned, began = caller.refetcher.scanned, time.monotonic()
        caller.ask(1, 0, offsets)
        caller.wait()
        took = time.monotonic() - began
        scanned = caller.refetcher.scanned - scanned
        assert [record.offset() for part in caller.parts[1] for record in part.records] == list(offsets)
        print(f"\n{what}: {scanned} messages scanned in {took:.2f} s, {scanned / took:,.0f} a second")  # noqa: T201
        caller.refetcher.close()
