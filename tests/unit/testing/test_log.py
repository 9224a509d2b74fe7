from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane import Message
from keylane.testing import MemoryLog, murmur2, partition_of


@pytest.mark.parametrize(
    ("data", "hashed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_agrees_with_kafkas_tests(data: bytes, hashed: int) -> None:
    assert murmur2(data) == hashed


@given(st.binary(max_size=40), st.integers(1, 100))
def test_key_is_always_in_the_same_partition(key: bytes, partitions: int) -> None:
    assert -(2**31) <= murmur2(key) < 2**31
    assert 0 <= partition_of(key, partitions) < partitions
    log = MemoryLog(partitions=partitions)
    found = {log.append("t", key=key, value=None).partition() for _ in range(3)}
    assert found == {partition_of(key, partitions)}


def test_offsets_count_up_in_each_partition() -> None:
    log = MemoryLog(partitions=2)
    places = [(r.partition(), r.offset()) for r in (log.append("t", key=None, value=b"") for _ in range(5))]
    assert places == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)], "keyless records go to each in turn"
    assert (log.end("t", 0), log.end("t", 1), log.end("other", 0)) == (3, 2, 0)


def test_record_can_become_a_message() -> None:
    log = MemoryLog()
    record = log.append("t", key=b"k", value=b"v", headers=[("event-id", b"e"), ("x", None)], timestamp=5)
    msg = Message(record)
    assert (msg.key, msg.value, msg.topic, msg.partition, msg.offset) == (b"k", b"v", "t", 0, 0)
    assert (msg.headers, msg.timestamp, msg.event_id) == ([("event-id", b"e"), ("x", None)], 5, "e")
    bare = Message(log.append("t", key=None, value=None))
    assert (bare.key, bare.value, bare.headers, bare.timestamp) == (None, None, [], None)


def test_changed_headers_of_a_message_do_not_change_the_log() -> None:
    record = MemoryLog().append("t", key=None, value=None, headers=[("a", b"1")])
    Message(record).headers.clear()
    assert Message(record).headers == [("a", b"1")]


def test_gap_leaves_offsets_without_records() -> None:
    log = MemoryLog()
    log.append("t", key=b"a", value=None)
    log.skip("t", 0, 3)
    log.append("t", key=b"b", value=None)
    assert [record.offset() for record in log.records("t", 0)] == [0, 4]
    assert [record.offset() for record in log.records("t", 0, start=1)] == [4]


def test_topics_and_partitions_are_read_separately() -> None:
    log = MemoryLog(partitions=2)
    second = log.append("t", key=None, value=b"1", partition=1)
    first = log.append("t", key=None, value=b"0", partition=0)
    other = log.append("u", key=b"k", value=b"u")
    assert log.records("t") == [first, second]
    assert log.records("t", 1) == [second]
    assert log.records("u") == [other]
    assert log.records("none") == []


@pytest.mark.parametrize("partition", [-1, 2])
def test_a_partition_that_does_not_exist_is_refused(partition: int) -> None:
    log = MemoryLog(partitions=2)
    for use in (
        lambda: log.append("t", key=b"k", value=None, partition=partition),
        lambda: log.records("t", partition),
        lambda: log.skip("t", partition),
    ):
        with pytest.raises(ValueError, match="partition must be 0 to 1 in topic"):
            use()


def test_topic_has_at_least_one_partition() -> None:
    with pytest.raises(ValueError, match="partitions must be at least 1, got 0"):
        MemoryLog(partitions=0)


def test_recreated_topic_is_empty_and_begins_at_offset_0() -> None:
    log = MemoryLog(partitions=2)
    for topic in ("a", "b"):
        log.append(topic, key=None, value=b"1", partition=1)
    log.recreate("a")
    assert (log.records("a"), log.end("a", 1), log.end("b", 1)) == ([], 0, 1)
    assert log.append("a", key=None, value=b"2", partition=1).offset() == 0
