from __future__ import annotations

import logging
from math import inf
from typing import Any

import pytest
from confluent_kafka import KafkaError as ClientError

from keylane.errors import BrokerError
from keylane.kafka.fetcher import Fetcher
from keylane.kafka.partition_reader import ErrorKind, PartitionReader, classify

END = ClientError._PARTITION_EOF
OUT_OF_RANGE = ClientError._AUTO_OFFSET_RESET
MISSING = ClientError.UNKNOWN_TOPIC_OR_PART
REFUSED = ClientError.TOPIC_AUTHORIZATION_FAILED
MOVED = ClientError.NOT_LEADER_FOR_PARTITION


class Came:
    """What the client hands out: a message, or an error with this code."""

    def __init__(self, offset: int, code: int | None = None, partition: int = 0) -> None:
        self._offset, self._code, self._partition = offset, code, partition

    def __len__(self) -> int:
        return 1

    def error(self) -> ClientError | None:
        return None if self._code is None else ClientError(self._code)

    def offset(self) -> int:
        return self._offset

    def partition(self) -> int:
        return self._partition


class Consumer:
    """Hands out what a test scripted."""

    def __init__(self, *script: Came) -> None:
        self.script = list(script)
        self.assigned: list[tuple[str, int, int]] = []

    def assign(self, places: list[Any]) -> None:
        self.assigned = [(place.topic, place.partition, place.offset) for place in places]

    def poll(self, _timeout: float) -> Came | None:
        return self.script.pop(0) if self.script else None

    def consume(self, most: int, _timeout: float) -> list[Came]:
        found, self.script = self.script[:most], self.script[most:]
        return found


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("keylane.kafka.partition_reader.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def make(*script: Came, **given: Any) -> tuple[PartitionReader, Consumer]:
    consumer: Any = Consumer(*script)
    return PartitionReader(consumer, "t", **given), consumer


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (END, ErrorKind.END),
        (OUT_OF_RANGE, ErrorKind.OUT_OF_RANGE),
        (MISSING, ErrorKind.MISSING),
        (ClientError._UNKNOWN_TOPIC, ErrorKind.MISSING),
        (ClientError._UNKNOWN_PARTITION, ErrorKind.MISSING),
        (REFUSED, ErrorKind.LASTING),
        (ClientError.GROUP_AUTHORIZATION_FAILED, ErrorKind.HARMLESS),
        (ClientError.CLUSTER_AUTHORIZATION_FAILED, ErrorKind.LASTING),
        (ClientError._AUTHENTICATION, ErrorKind.LASTING),
        (MOVED, ErrorKind.PASSING),
        (ClientError._TRANSPORT, ErrorKind.PASSING),
        (ClientError._ALL_BROKERS_DOWN, ErrorKind.PASSING),
    ],
)
def test_classify_gives_each_code_its_kind(code: int, kind: ErrorKind) -> None:
    assert classify(ClientError(code)) is kind


def test_classify_takes_a_fatal_error_as_lasting() -> None:
    assert classify(ClientError(MOVED, "fenced", fatal=True)) is ErrorKind.LASTING


def test_reader_keeps_messages_and_reports_in_order() -> None:
    script = [Came(1), Came(2, OUT_OF_RANGE), Came(9), Came(10, END)]
    reader, consumer = make(*script)
    reader.assign({0: 1, 3: 7})
    assert consumer.assigned == [("t", 0, 1), ("t", 3, 7)]
    assert reader.read(0) == script
    assert reader.read(0) == []


def test_reader_reads_no_more_than_asked_for() -> None:
    reader, _ = make(*map(Came, range(5)))
    assert [len(reader.read(0, 2)) for _ in range(4)] == [2, 2, 1, 0]


@pytest.mark.parametrize("code", [REFUSED, ClientError._AUTHENTICATION])
def test_reader_raises_a_lasting_error_at_once(code: int) -> None:
    reader, _ = make(Came(1), Came(-1, code))
    with pytest.raises(BrokerError, match=r"topic 't' cannot be read: "):
        reader.read(0)


def test_reader_leaves_out_passing_errors_and_logs_them(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    message = Came(1)
    reader, consumer = make(Came(-1, MOVED), message, Came(-1, MOVED))
    with caplog.at_level(logging.WARNING, "keylane.kafka"):
        assert reader.read(0) == [message]
        assert len(caplog.records) == 1, "at most one in ten seconds"
        clock.now += 10
        consumer.script = [Came(-1, MOVED)]
        reader.read(0)
    assert len(caplog.records) == 2


def test_reader_waits_for_a_missing_topic(clock: Clock) -> None:
    reader, consumer = make(Came(-1, MISSING))
    assert reader.read(0) == []
    clock.now += 29.9
    consumer.script = [Came(-1, MISSING)]
    assert reader.read(0) == []
    clock.now += 0.1
    consumer.script = [Came(-1, MISSING)]
    with pytest.raises(BrokerError, match=r"topic 't' cannot be read: "):
        reader.read(0)


@pytest.mark.parametrize("code", [None, END, MOVED])
def test_reader_forgets_a_missing_partition_that_answers(clock: Clock, code: int | None) -> None:
    reader, consumer = make(Came(-1, MISSING))
    reader.read(0)
    consumer.script = [Came(5, code)]
    reader.read(0)
    clock.now += 60
    consumer.script = [Came(-1, MISSING)]
    assert reader.read(0) == []


def test_reader_raises_for_a_missing_partition_among_others(clock: Clock) -> None:
    reader, consumer = make(Came(-1, MISSING, partition=1))
    reader.read(0)
    clock.now += 30
    consumer.script = [Came(5), Came(-1, MISSING, partition=1)]
    with pytest.raises(BrokerError):
        reader.read(0)


def test_reader_without_patience_raises_for_a_missing_topic() -> None:
    reader, _ = make(Came(-1, MISSING), missing_seconds=0, what="was not restored")
    with pytest.raises(BrokerError, match="topic 't' was not restored"):
        reader.read(0)


def test_reader_with_endless_patience_never_raises(clock: Clock) -> None:
    reader, consumer = make(Came(-1, MISSING), missing_seconds=inf)
    reader.read(0)
    clock.now += 1e9
    consumer.script = [Came(-1, MISSING)]
    assert reader.read(0) == []


def test_reader_that_never_raises_logs_lasting_errors(caplog: pytest.LogCaptureFixture) -> None:
    reader, _ = make(Came(-1, REFUSED), Came(-1, MISSING), raises=False, missing_seconds=0)
    assert reader.read(0) == []
    assert "reading continues after an error topic=t" in caplog.text


def test_check_silence_says_why_nothing_came(clock: Clock) -> None:
    reader, _ = make(Came(-1, MOVED))
    clock.now += 5
    reader.progressed()
    clock.now += 30
    reader.check_silence(30, "topic 't' was not read to its end")
    clock.now += 0.1
    missed = r"topic 't' was not read to its end: nothing came for 30 s "
    with pytest.raises(BrokerError, match=missed + r"\(no answer\)"):
        reader.check_silence(30, "topic 't' was not read to its end")
    reader.read(0)
    with pytest.raises(BrokerError, match=missed + r"\(.*[Ll]eader"):
        reader.check_silence(30, "topic 't' was not read to its end")
    with pytest.raises(BrokerError, match=missed + r"\(an open transaction\)"):
        reader.check_silence(30, "topic 't' was not read to its end", "an open transaction")


def make_fetcher(*script: Came) -> tuple[Fetcher, Consumer]:
    consumer: Any = Consumer(*script)
    made = Fetcher(
        consumer, "t", {0: 0, 1: 0}, capacity=100, deliver=lambda _batch: None, fail=lambda _error: None
    )
    made._may_fetch()
    return made, consumer


def test_fetcher_uses_the_same_table_of_errors(clock: Clock) -> None:
    fetcher, consumer = make_fetcher(Came(-1, MISSING))
    fetcher._fetch()
    clock.now += 31
    consumer.script = [Came(-1, MISSING)]
    with pytest.raises(BrokerError, match="cannot be read"):
        fetcher._fetch()
    consumer.script = [Came(-1, REFUSED)]
    with pytest.raises(BrokerError, match="cannot be read"):
        fetcher._fetch()


def test_fetcher_forgets_a_missing_topic_that_came_back(clock: Clock) -> None:
    fetcher, consumer = make_fetcher(Came(-1, MISSING))
    fetcher._fetch()
    consumer.script = [Came(0)]
    fetcher._fetch()
    clock.now += 3600
    consumer.script = [Came(-1, MISSING)]
    fetcher._fetch()
