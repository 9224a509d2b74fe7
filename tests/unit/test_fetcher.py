from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keylane.kafka import fetcher
from keylane.kafka.fetcher import Fetcher

if TYPE_CHECKING:
    import pytest


class Consumer:
    def __init__(self) -> None:
        self.paused: set[int] = set()

    def pause(self, places: list[Any]) -> None:
        self.paused |= {place.partition for place in places}

    def resume(self, places: list[Any]) -> None:
        self.paused -= {place.partition for place in places}


def make(**given: Any) -> tuple[Fetcher, Consumer]:
    consumer: Any = Consumer()
    made = Fetcher(
        consumer,
        "t",
        {0: 0, 1: 0},
        capacity=100,
        deliver=lambda _batch: None,
        fail=lambda _error: None,
        **given,
    )
    return made, consumer


def test_a_partition_is_paused_as_the_last_resort_when_too_many_offsets_are_kept_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetcher, "AWAY_MAX", 2000)
    made, consumer = make()
    share = made.shares[0]
    share.handed, share.done, share.away = 1100, 1000, 1000
    assert made._room() is False, "it holds 100, which is all there is room for"
    share.done = 1090
    assert made._room() is True
    assert made.paused == []
    share.handed, share.done, share.away = 1111, 1101, 1001
    assert made._room() is True, "the other partition is read on"
    assert (made.paused, consumer.paused) == ([0], {0})
    share.away = 501
    share.done = 1111
    made._room()
    assert made.paused == [0], "not before half of them are done"
    share.away = 500
    made._room()
    assert (made.paused, consumer.paused) == ([], set())


def test_large_messages_leave_room_for_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "MAX_BYTES", 1000)
    made, _ = make()
    made._mean_size = 50.0
    made._room()
    assert made.room == 20


def test_a_partition_that_holds_most_is_paused_when_there_is_no_room_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetcher, "_STUCK", -1.0)
    made, consumer = make()
    made.shares[1].handed = 51
    assert made._room() is False
    assert made._room() is False
    assert consumer.paused == {1}
    made.shares[1].done = 26
    assert made._room() is True
    assert consumer.paused == set()


def test_nothing_is_read_ahead_of_lanes_that_queue_for_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "PLENTY", 10)
    monkeypatch.setattr(fetcher, "_STUCK", -1.0)
    busy = True
    made, consumer = make(busy=lambda: busy)
    share = made.shares[0]
    share.handed = 9
    assert made._room() is True, "there is not plenty of them"
    share.handed = 10
    assert [made._room(), made._room()] == [False, False]
    assert consumer.paused == set(), "it is no partition's fault"
    busy = False
    assert made._room() is True, "the lanes that hold them wait for something else"
