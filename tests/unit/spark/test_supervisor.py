"""The supervisor, in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from keylane.errors import BrokerError, FailureGuardError, SettingsError, TakenOverError
from keylane.spark.failure_report import QueryFailureKind
from keylane.spark.supervisor import HEALTHY_AFTER_SECONDS, supervise

if TYPE_CHECKING:
    from keylane.spark.failure_report import QueryFailure


class World:
    """Queries that live for these seconds and then fail as given; a clock that only sleep moves."""

    def __init__(self, *lives: tuple[float, Exception | None], stop_at: float = 1e9) -> None:
        self.now = 0.0
        self.lives = list(lives)
        self.stop_at = stop_at
        self.said: list[str] = []
        self.starts: list[float] = []

    def start(self) -> tuple[float, Exception | None]:
        self.starts.append(self.now)
        life = self.lives.pop(0)
        if life[0] < 0:  # fails while it starts, which took so long
            self.now -= life[0]
            assert life[1] is not None
            raise life[1]
        return life

    def watch(self, life: tuple[float, Exception | None]) -> Exception | None:
        seconds, error = life
        if isinstance(error, ConnectionError):
            self.now += seconds
            raise error
        if self.now + seconds > self.stop_at:
            self.now = self.stop_at
            return None
        self.now += seconds
        return error

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 0.5, "a stop must be seen soon"
        self.now += seconds

    def run(self) -> QueryFailure | None:
        return supervise(
            self.start,
            self.watch,
            say=self.said.append,
            asked=lambda: self.now >= self.stop_at,
            clock=lambda: self.now,
            sleep=self.sleep,
        )


def gaps(world: World, lives: list[float]) -> list[float]:
    """Seconds between the end of a query and the next start."""
    ends = [start + life for start, life in zip(world.starts, lives, strict=False)]
    return [round(start - end, 3) for end, start in zip(ends, world.starts[1:], strict=False)]


def test_query_that_ends_normally_is_not_restarted() -> None:
    world = World((5, None))
    assert world.run() is None
    assert len(world.starts) == 1
    assert world.said == []


def test_the_wait_doubles_from_one_second_to_thirty() -> None:
    error = BrokerError("no answer")
    world = World(*[(2, error)] * 7, (2, None))
    assert world.run() is None
    assert gaps(world, [2] * 8) == [1, 2, 4, 8, 16, 30, 30]
    assert world.said[0] == "the query failed: no answer. Restarting it in 1 s (failure 1 in a row)"
    assert world.said[6] == "the query failed: no answer. Restarting it in 30 s (failure 7 in a row)"
    assert len(world.said) == 7


def test_a_healthy_minute_brings_the_wait_back_to_one_second() -> None:
    error = BrokerError("no answer")
    lives = [1, 1, 1, HEALTHY_AFTER_SECONDS, 1, HEALTHY_AFTER_SECONDS - 1, 1]
    world = World(*((life, error) for life in lives[:-1]), (1, None))
    assert world.run() is None
    assert gaps(world, lives) == [1, 2, 4, 1, 2, 4]
    assert "failure 1 in a row" in world.said[3]


def test_supervisor_counts_a_late_jvm_death_as_a_new_failure() -> None:
    lives = [1, 1, HEALTHY_AFTER_SECONDS, 1]
    world = World(*((life, ConnectionRefusedError(111)) for life in lives[:-1]), (1, None))
    assert world.run() is None
    assert gaps(world, lives) == [1, 2, 1]


def test_a_night_of_failures_is_survived() -> None:
    world = World(*[(0.0, BrokerError("no answer"))] * 3000, (1, None))
    world.sleep = lambda seconds: setattr(world, "now", world.now + 30)  # type: ignore[method-assign]
    assert world.run() is None
    assert "in 30 s (failure 3000 in a row)" in world.said[-1]


def test_supervisor_retries_a_failed_start() -> None:
    error = BrokerError("no answer")
    world = World(
        (1, error), (-2 * HEALTHY_AFTER_SECONDS, error), (-2 * HEALTHY_AFTER_SECONDS, error), (3, None)
    )
    assert world.run() is None
    assert ["in 1 s" in world.said[0], "in 2 s" in world.said[1], "in 4 s" in world.said[2]] == [True] * 3


@pytest.mark.parametrize("life", [0.5, -1], ids=["while it runs", "while it starts"])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SettingsError("the app does not import"), QueryFailureKind.APP),
        (FailureGuardError("most fail"), QueryFailureKind.FAILURE_GUARD),
        (TakenOverError("another run"), QueryFailureKind.TAKEN_OVER),
    ],
)
def test_the_apps_own_failure_is_the_end(error: Exception, kind: QueryFailureKind, life: float) -> None:
    world = World((1, BrokerError("no answer")), (life, error))
    failure = world.run()
    assert failure is not None
    assert (failure.kind, failure.line) == (kind, str(error))
    assert len(world.starts) == 2
    assert len(world.said) == 1, "what is final is told by who ends"


def test_a_stop_in_the_backoff_is_the_end() -> None:
    world = World(*[(1, BrokerError("no answer"))] * 9, stop_at=25.0)
    assert world.run() is None
    assert len(world.starts) == 5
    assert world.now <= 25.5, "it was not waited out"


def test_failure_while_stopping_is_reported_without_a_retry() -> None:
    class Stopping(World):
        def watch(self, life: tuple[float, Exception | None]) -> Exception | None:
            self.now = self.stop_at
            return life[1]

    world = Stopping((1, BrokerError("no answer")), stop_at=5.0)
    failure = world.run()
    assert failure is not None
    assert failure.line == "no answer"
    assert len(world.starts) == 1


def test_a_stop_while_it_starts_is_the_end_when_the_start_fails() -> None:
    world = World((-3, BrokerError("no answer")), stop_at=2.0)
    assert world.run() is not None
    assert len(world.starts) == 1


def test_a_bug_of_our_own_is_not_hidden() -> None:
    world = World((-1, TypeError("x")))
    with pytest.raises(TypeError):
        world.run()
