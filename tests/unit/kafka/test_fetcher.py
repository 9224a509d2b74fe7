from __future__ import annotations

from typing import Any

import pytest

from keylane.kafka import fetcher
from keylane.kafka.fetcher import Fetcher


class Record:
    """A message of the client, with this many bytes."""

    def __init__(self, offset: int, size: int = 1) -> None:
        self._offset, self._size = offset, size

    def __len__(self) -> int:
        return self._size

    def error(self) -> None:
        return None

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset


class Consumer:
    def __init__(self) -> None:
        self.paused: set[int] = set()
        self.log: list[Record] = []
        self.asked: list[int] = []

    def poll(self, _timeout: float) -> Record | None:
        return self.log.pop(0) if self.log else None

    def consume(self, most: int, _timeout: float) -> list[Record]:
        self.asked.append(most)
        found, self.log = self.log[:most], self.log[most:]
        return found

    def pause(self, places: list[Any]) -> None:
        self.paused |= {place.partition for place in places}

    def resume(self, places: list[Any]) -> None:
        self.paused -= {place.partition for place in places}


def make(capacity: int = 100, **given: Any) -> tuple[Fetcher, Consumer]:
    consumer: Any = Consumer()
    made = Fetcher(
        consumer,
        "t",
        {0: 0, 1: 0},
        capacity=capacity,
        deliver=lambda _batch: None,
        fail=lambda _error: None,
        **given,
    )
    return made, consumer


def test_partition_with_too_many_kept_offsets_is_paused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetcher, "EVICTED_ENTRIES_MAX", 2000)
    made, consumer = make()
    flow = made.flows[0]
    flow.delivered, flow.done, flow.evicted = 1100, 1000, 1000
    assert made._may_fetch() is False, "it holds 100, which is all there is room for"
    flow.done = 1090
    assert made._may_fetch() is True
    assert made.paused == []
    flow.delivered, flow.done, flow.evicted = 1111, 1101, 1001
    assert made._may_fetch() is True, "the other partition is read on"
    assert (made.paused, consumer.paused) == ([0], {0})
    flow.evicted = 501
    flow.done = 1111
    made._may_fetch()
    assert made.paused == [0], "not before half of them are done"
    flow.evicted = 500
    made._may_fetch()
    assert (made.paused, consumer.paused) == ([], set())


def test_large_messages_leave_room_for_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "BUFFERED_BYTES_MAX", 1000)
    made, _ = make()
    made._mean_size = 50.0
    made._may_fetch()
    assert made.room == 20


def test_largest_partition_is_paused_when_room_stays_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetcher, "_PAUSE_AFTER_SECONDS", -1.0)
    made, consumer = make()
    made.flows[1].delivered = 51
    assert made._may_fetch() is False
    assert made._may_fetch() is False
    assert consumer.paused == {1}
    made.flows[1].done = 26
    assert made._may_fetch() is True
    assert consumer.paused == set()


def test_nothing_is_read_ahead_of_lanes_that_queue_for_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "PREFETCH_MESSAGES_MAX", 10)
    monkeypatch.setattr(fetcher, "_PAUSE_AFTER_SECONDS", -1.0)
    busy = True
    made, consumer = make(loop_busy=lambda: busy)
    flow = made.flows[0]
    flow.delivered = 9
    assert made._may_fetch() is True, "there is not plenty of them"
    flow.delivered = 10
    assert [made._may_fetch(), made._may_fetch()] == [False, False]
    assert consumer.paused == set(), "it is no partition's fault"
    busy = False
    assert made._may_fetch() is True, "the lanes that hold them wait for something else"


def test_messages_of_stuck_lanes_do_not_count_as_plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "PREFETCH_MESSAGES_MAX", 10)
    stuck = 0
    made, _ = make(loop_busy=lambda: True, stuck=lambda: stuck)
    made.flows[0].delivered = 15
    assert made._may_fetch() is False
    stuck = 6
    assert made._may_fetch() is True, "nine of them can run"


@pytest.mark.parametrize("capacity", [2, 3, 10, 16, 50, 100, 200, 500, 1000, 2000, 3500, 5000])
@pytest.mark.parametrize("hold", [0, 0.3, 1])
def test_a_task_is_never_given_more_than_its_capacity(capacity: int, hold: float) -> None:
    """Lanes that read again take their eighth at the worst of times: after it was decided how much to ask for."""
    made, consumer = make(capacity)
    consumer.log = [Record(offset) for offset in range(20_000)]
    again = max(1, capacity // 8)
    made.flows[1].delivered = int(hold * capacity / 2)
    most = made.buffered
    while made._may_fetch():
        made._fetch()
        most = max(most, made.buffered)
    assert most + again <= capacity
    assert most >= capacity // 4, "and is not starved"


def test_large_rooms_are_filled_by_the_thousand() -> None:
    made, consumer = make(65_536)
    consumer.log = [Record(offset) for offset in range(20_000)]
    for _ in range(3):
        assert made._may_fetch()
        made._fetch()
    assert consumer.asked == [999] * 3


def test_a_large_message_is_not_followed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "BUFFERED_BYTES_MAX", 10_000)
    made, consumer = make(65_536)
    made._mean_size = 10.0
    consumer.log = [*(Record(n, 4_000) for n in range(6)), Record(6, 10)]
    while made._may_fetch():
        made._fetch()
    assert made.flows[0].bytes_buffered == 8_000, "it stops at half: one more came while there was room"
    made.flows[0].done, made.flows[0].bytes_done = 1, 4_000
    assert made._may_fetch() is True, "they are counted by the byte: when they are done there is room"


def test_a_message_larger_than_all_room_comes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "BUFFERED_BYTES_MAX", 10_000)
    made, consumer = make(65_536)
    consumer.log = [Record(n, 50_000) for n in range(3)]
    assert made._may_fetch() is True
    made._fetch()
    assert made.flows[0].delivered == 1
    assert made._may_fetch() is False
    made.flows[0].done, made.flows[0].bytes_done = 1, 50_000
    assert made._may_fetch() is True
