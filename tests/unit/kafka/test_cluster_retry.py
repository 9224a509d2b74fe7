"""The planner's patience with a cluster that gives no answer, in virtual time."""

from __future__ import annotations

import logging
import os

import pytest
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException

from keylane.errors import BrokerError
from keylane.kafka import cluster
from keylane.kafka.cluster import PLANNER_RETRY_SECONDS, retry_while_moving, wait_for_cluster


class Clock:
    """Replaces the module ``time``."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cluster, "time", clock)
    return clock


class Planner:
    def __init__(self, clock: Clock, back_at: float, takes: float) -> None:
        self.clock, self.back_at, self.takes = clock, back_at, takes
        self.calls = 0

    @wait_for_cluster
    def ask(self, what: str) -> str:
        self.calls += 1
        if self.clock.now >= self.back_at:
            return f"{what}: 7"
        self.clock.now += self.takes
        raise BrokerError("no Kafka broker answered")


@pytest.mark.parametrize("takes", [0.0, 10.0], ids=["refused", "timed out"])
def test_an_answer_that_comes_late_is_an_answer(
    clock: Clock, takes: float, caplog: pytest.LogCaptureFixture
) -> None:
    planner = Planner(clock, back_at=35, takes=takes)
    with caplog.at_level(logging.WARNING):
        assert planner.ask("ends") == "ends: 7"
    assert 35 <= clock.now <= 46
    assert 3 <= len(caplog.records) <= 4, "a line every 10 s"
    assert "no Kafka broker answered" in caplog.text


def test_after_a_minute_it_fails_and_says_how_long_it_waited(clock: Clock) -> None:
    planner = Planner(clock, back_at=1e9, takes=10)
    with pytest.raises(BrokerError, match=r"no Kafka broker answered; waited for \d\d s"):
        planner.ask("ends")
    assert PLANNER_RETRY_SECONDS <= clock.now <= PLANNER_RETRY_SECONDS + 11


def test_immediate_answer_is_reported_at_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    assert Planner(clock, back_at=0, takes=1).ask("ends") == "ends: 7"
    assert clock.now == 0
    assert not caplog.records


def test_planner_without_its_spark_stops_waiting(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(clock, back_at=1e9, takes=10)
    monkeypatch.setattr(os, "getppid", lambda: 100 if clock.now < 15 else 1)
    with pytest.raises(BrokerError):
        planner.ask("ends")
    assert clock.now < 25


@pytest.mark.parametrize("code", [ClientError.UNKNOWN_LEADER_EPOCH, ClientError.FENCED_LEADER_EPOCH])
def test_leader_of_another_epoch_is_asked_again(clock: Clock, code: int) -> None:
    """A new topic: the client knows its leader before the leader does, or knows only the one before."""
    answers: list[KafkaException | int] = [KafkaException(ClientError(code)), 7]

    def ask() -> int:
        answer = answers.pop(0)
        if isinstance(answer, KafkaException):
            raise answer
        return answer

    assert retry_while_moving(ask) == 7
    assert 0 < clock.now < 1
