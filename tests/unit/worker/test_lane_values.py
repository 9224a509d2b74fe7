"""A worker's lane state: memory, files and the topic agree, whatever is taken and released."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, State
from keylane.engine.lane_state import StoredValue
from keylane.offsets.murmur2 import partition_of
from keylane.offsets.slots import ALL, Slots, slot_of
from keylane.worker import lane_values
from keylane.worker.lane_values import LaneValues
from support.state_log import identity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from keylane.engine.lane_state import Name

LOW, HIGH = Slots(0, 32767), Slots(32768, 65535)


class Topic:
    """The topic in memory, and the questions that a worker asks about it."""

    def __init__(self, partitions: int = 1) -> None:
        self.records: list[list[tuple[str, bytes, bytes | None]]] = [[] for _ in range(partitions)]
        self.read_records = 0

    def write(self, partition: int, key: str, content: bytes | None, tag: str = "s/n") -> None:
        self.records[partition].append((tag, key.encode(), content))

    def identity(self, topic: str) -> Any:
        return identity(topic)

    def partitions(self, _topic: str) -> int:
        return len(self.records)

    def ends(self, _topic: str, partitions: Any) -> dict[int, int]:
        return {p: len(self.records[p]) for p in partitions}

    def read(self, starts: Mapping[int, int], ends: Mapping[int, int], take: Callable[..., None]) -> None:
        for partition, start in starts.items():
            for offset in range(start, ends[partition]):
                self.read_records += 1
                tag, key, content = self.records[partition][offset]
                value = None if content is None else StoredValue(content, 0, offset)
                take(partition, tag, key, value, offset)

    def close(self) -> None:
        pass


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LaneValues]:
    monkeypatch.setattr(lane_values, "cache_folder", lambda: tmp_path)
    app = App("a", source="in", sink="out")

    @app.stage
    async def work(msg: Message, n: State[int]) -> None:
        pass

    def made(topic: Topic, **options: Any) -> LaneValues:
        values = LaneValues(None, app.spec, topic, identity(), **options)  # type: ignore[arg-type]
        values._reader = topic  # type: ignore[assignment]
        return values

    return made


def content(values: LaneValues, key: str, partition: int = 0) -> bytes | None:
    found = values.get((partition, key.encode(), "s/n"))
    return None if found is None else found.content


def commit(values: LaneValues, topic: Topic, key: str, value: bytes | None) -> None:
    topic.write(0, key, value)
    values.put({(0, key.encode(), "s/n"): StoredValue(value, 0, 0)})
    values.committed_to(topic.ends("", [0]))


def test_restore_reads_the_last_record_of_each_name(worker: Callable[..., LaneValues]) -> None:
    topic = Topic()
    values = worker(topic)
    for value in (b"1", b"2"):
        topic.write(0, "a", value)
    topic.write(0, "b", b"1")
    topic.write(0, "b", None)
    values.take(0, ALL)
    assert (content(values, "a"), content(values, "b"), content(values, "c")) == (b"2", None, None)
    values.close()


def test_next_process_reads_only_what_is_new(worker: Callable[..., LaneValues]) -> None:
    topic = Topic()
    values = worker(topic)
    values.take(0, ALL)
    for n in range(100):
        commit(values, topic, f"k{n}", b"1")
    values.close()
    topic.write(0, "k5", b"2")
    topic.write(0, "k6", None)
    values = worker(topic)
    values.take(0, ALL)
    assert topic.read_records == 2
    assert (content(values, "k4"), content(values, "k5"), content(values, "k6")) == (b"1", b"2", None)
    values.close()


def test_what_was_not_flushed_is_read_again(worker: Callable[..., LaneValues]) -> None:
    topic = Topic()
    values = worker(topic)
    values.take(0, ALL)
    commit(values, topic, "a", b"1")
    values._flush(0)
    commit(values, topic, "a", b"2")
    for file in values._files.values():
        file.close()  # as if it was killed
    values = worker(topic)
    values.take(0, ALL)
    assert (content(values, "a"), topic.read_records) == (b"2", 1)
    values.close()


def test_cold_values_come_from_the_file(worker: Callable[..., LaneValues]) -> None:
    topic = Topic()
    values = worker(topic, hot_bytes=4000)  # a few values
    values.take(0, ALL)
    for n in range(500):
        commit(values, topic, f"k{n}", b"%d" % n)
        if n % 100 == 50:
            values._flush(0)
    assert [content(values, f"k{n}") for n in range(500)] == [b"%d" % n for n in range(500)]
    assert len(values._young) + len(values._old) < 20
    values.close()


def test_ranges_are_taken_and_released_one_by_one(worker: Callable[..., LaneValues]) -> None:
    topic = Topic()
    keys = [f"k{n}" for n in range(40)]
    for key in keys:
        topic.write(0, key, b"1")
    values = worker(topic)
    values.take(0, LOW)
    assert {key for key in keys if content(values, key)} == {k for k in keys if slot_of(k.encode(), 0) in LOW}
    for key in keys:
        if slot_of(key.encode(), 0) in LOW:
            commit(values, topic, key, b"2")
        else:
            topic.write(0, key, b"3")  # another worker's
    values.take(0, HIGH)
    expected = {key: b"2" if slot_of(key.encode(), 0) in LOW else b"3" for key in keys}
    assert {key: content(values, key) for key in keys} == expected
    values.release(0, LOW)
    for key in keys:
        if slot_of(key.encode(), 0) in LOW:
            topic.write(0, key, b"4")  # the next owner's
        else:
            commit(values, topic, key, b"5")
    values.take(0, LOW)
    expected = {key: b"4" if slot_of(key.encode(), 0) in LOW else b"5" for key in keys}
    assert {key: content(values, key) for key in keys} == expected
    values.close()


def test_slots_that_others_owned_meanwhile_are_read_again(worker: Callable[..., LaneValues]) -> None:
    topic = Topic()
    values = worker(topic)
    values.take(0, ALL)
    commit(values, topic, "a", b"1")
    commit(values, topic, "b", b"1")
    values.close()
    half = LOW if slot_of(b"a", 0) in LOW else HIGH
    values = worker(topic)
    values.take(0, half)
    commit(values, topic, "a", b"2")
    topic.write(0, "b", b"2")
    commit(values, topic, "a", b"3")
    values.close()
    values = worker(topic)
    values.take(0, ALL)
    assert (content(values, "a"), content(values, "b")) == (b"3", b"2")
    values.close()


def test_truncated_topic_is_read_from_its_start(worker: Callable[..., LaneValues]) -> None:
    topic = Topic()
    values = worker(topic)
    values.take(0, ALL)
    for n in range(10):
        commit(values, topic, f"k{n}", b"1")
    values.close()
    topic.records[0] = [("s/n", b"k1", b"7")]
    values = worker(topic)
    values.take(0, ALL)
    assert (content(values, "k1"), content(values, "k2")) == (b"7", None)
    values.close()


def test_lane_sees_all_its_values_wherever_they_are(worker: Callable[..., LaneValues]) -> None:
    topic = Topic()
    for tag in ("s/a", "s/b", "s/c"):
        topic.write(0, "k", b"1", tag)
    values = worker(topic)
    values.take(0, ALL)
    values.put({(0, b"k", "s/b"): StoredValue(b"2", 0, 0), (0, b"k", "s/c"): StoredValue(None, 0, 0)})
    found = {tag: value.content for tag, value in values.lane(0, b"k").items()}
    assert found == {"s/a": b"1", "s/b": b"2"}
    values._flush(0)
    assert {tag: value.content for tag, value in values.lane(0, b"k").items()} == found
    values.close()


def test_failed_restore_leaves_the_file_free(
    worker: Callable[..., LaneValues], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = Topic()
    topic.write(0, "a", b"1")
    values = worker(topic)
    with monkeypatch.context() as patch:
        patch.setattr(topic, "read", lambda *_given: (_ for _ in ()).throw(RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            values.take(0, ALL)
    values.take(0, ALL)
    assert content(values, "a") == b"1"
    assert next(iter(values._files.values())).path.name == "0.0.sqlite"
    values.close()


def test_values_of_moved_keys_are_found(worker: Callable[..., LaneValues]) -> None:
    topic = Topic(partitions=2)
    keys = [f"k{n}" for n in range(40)]
    for key in keys:
        topic.write(partition_of(key.encode(), 2), key, b"1")
    topic.records += [[], []]
    here = [key for key in keys if partition_of(key.encode(), 4) == 3]
    topic.write(3, here[0], b"2")  # it has moved already
    topic.write(partition_of(here[1].encode(), 2), here[1], None)  # it was removed before
    moved: dict[Name, StoredValue] = {}
    worker(topic).gather({3: ALL}, 4, moved.__setitem__)
    assert {lane for _, lane, _ in moved} == {key.encode() for key in here[2:]}
    assert {name[0] for name in moved} == {3}


def test_due_values_are_those_of_owned_slots_wherever_they_are(worker: Callable[..., LaneValues]) -> None:
    topic = Topic()
    values = worker(topic)
    values.take(0, ALL)
    values.put({(0, b"k%d" % n, "t/a"): StoredValue(b"1", 10 + n, 0) for n in range(20)})
    values._flush(0)
    values.put({(0, b"k3", "t/a"): StoredValue(None, 0, 0), (0, b"k5", "t/a"): StoredValue(b"2", 500, 0)})
    values.put({(0, b"new", "t/a"): StoredValue(b"1", 12, 0), (0, b"s", "s/a"): StoredValue(b"1", 1, 0)})
    found = [(name[1], value.due) for name, value in values.due(15, "t/", 100, after=10)]
    assert sorted(found) == [(b"k1", 11), (b"k2", 12), (b"k4", 14), (b"new", 12)]
    assert [due for _, due in found] == sorted(due for _, due in found)
    assert len(values.due(15, "t/", 2, after=10)) == 2
    assert values.next_due("t/", after=28) == 29
    assert values.next_due("t/", after=29) == 500
    values.release(0, LOW)
    assert all(slot_of(name[1], 0) in HIGH for name, _ in values.due(1000, "t/", 100))
    values.close()
