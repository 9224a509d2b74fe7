from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keylane import SettingsError
from keylane.policies.breaker import Breaker, Circuit, CircuitState, CircuitStatistics

CLOSED, OPEN = CircuitState.CLOSED, CircuitState.OPEN
HALF_OPEN, RECOVERING = CircuitState.HALF_OPEN, CircuitState.RECOVERING
ALLOWED = {
    (CLOSED, OPEN),
    (OPEN, HALF_OPEN),
    (HALF_OPEN, OPEN),
    (HALF_OPEN, RECOVERING),
    (RECOVERING, OPEN),
    (RECOVERING, CLOSED),
}
SMALL = Breaker(minimum=4, window=10.0, open_for=5.0, probes=3)


class CircuitAgainstLists(RuleBasedStateMachine):
    """The circuit against the list of everything that ever ended, with its time."""

    @initialize(
        rate=st.sampled_from([0.3, 0.5, 1.0]),
        window=st.sampled_from([10.0, 20.0]),
        minimum=st.sampled_from([1, 3, 8]),
        open_for=st.sampled_from([1.0, 7.0]),
        probes=st.integers(1, 3),
    )
    def begin(self, rate: float, window: float, minimum: int, open_for: float, probes: int) -> None:
        self.breaker = Breaker(
            failure_rate=rate, window=window, minimum=minimum, open_for=open_for, probes=probes
        )
        self.changes: list[tuple[CircuitState, CircuitState]] = []
        self.circuit = Circuit(self.breaker, lambda old, new: self.changes.append((old, new)))
        self.now = 1000.0
        self.state = CLOSED
        self.moves = 0
        self.since: float | None = None
        self.until = 0.0
        self.live: list[int] = []  # generations of the calls in flight
        self.generation = 0
        self.ended: list[tuple[float, bool]] = []  # of this window: when, and whether it failed
        self.counted = (0, 0)
        self.probes = 0
        self.limit = 0

    # The model.

    def go(self, state: CircuitState) -> None:
        self.state = state
        self.streak = 0
        self.moves += 1
        self.since = self.now
        if state is OPEN:
            self.until = self.now + self.breaker.open_for
            self.generation += 1
        else:
            self.probes = 0
            self.limit = self.breaker.probes
        if state in (HALF_OPEN, RECOVERING):
            self.ended = []
            self.counted = (0, 0)

    streak = 0

    def free(self) -> int | None:
        young = self.live.count(self.generation)
        return {
            CLOSED: None,
            OPEN: self.breaker.probes if self.now >= self.until else 0,
            HALF_OPEN: self.breaker.probes - self.probes,
            RECOVERING: self.limit - young,
        }[self.state]

    def count(self, *, failure: bool) -> None:
        self.ended.append((self.now, failure))
        width = self.breaker.window / 10
        oldest = self.now // width - 9
        recent = [failed for time, failed in self.ended if time // width >= oldest or self.state is HALF_OPEN]
        self.counted = (len(recent), sum(recent))
        bad = sum(recent) / len(recent) >= self.breaker.failure_rate
        self.streak = self.streak + 1 if failure else 0
        if self.state is HALF_OPEN:
            if len(recent) == self.breaker.probes:
                self.go(OPEN if bad else RECOVERING)
        elif failure:
            minimum = self.breaker.minimum if self.state is CLOSED else self.breaker.probes
            if min(self.streak, sum(recent)) >= minimum or (bad and len(recent) >= minimum):
                self.go(OPEN)
        elif self.state is RECOVERING:
            self.limit += 1
            if self.limit >= 64 * self.breaker.probes:
                self.go(CLOSED)

    # What happens.

    @rule(seconds=st.sampled_from([0.0, 0.25, 1.0, 1.0, 3.0, 8.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def call(self) -> None:
        free = self.free()
        if self.state is OPEN and free:
            self.go(HALF_OPEN)
        admitted = self.circuit.admit(self.now)
        assert admitted == (free is None or free > 0)
        if admitted:
            assert self.circuit.generation == self.generation
            self.live.append(self.generation)
            self.probes += self.state is HALF_OPEN

    @precondition(lambda self: self.live)
    @rule(data=st.data(), end=st.sampled_from(["succeeded", "failed", "failed", "dropped"]))
    def one_ends(self, data: st.DataObject, end: str) -> None:
        generation = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        getattr(self.circuit, end)(self.now, generation)
        if generation != self.generation:
            return
        if end == "dropped":
            self.probes -= self.state is HALF_OPEN
        else:
            self.count(failure=end == "failed")

    @rule(rounds=st.integers(1, 8), share=st.sampled_from([0.0, 0.0, 0.2, 1.0]), seed=st.integers(0, 99))
    def many_calls(self, rounds: int, share: float, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(rounds):
            before = len(self.live)
            for _ in range(20):
                self.call()
            for generation in self.live[before:]:
                self.live.remove(generation)
                failure = rng.random() < share
                (self.circuit.failed if failure else self.circuit.succeeded)(self.now, generation)
                if generation == self.generation:
                    self.count(failure=failure)

    @rule()
    def nobody_waits(self) -> None:
        self.circuit.nobody_waits(self.now)
        if self.state is RECOVERING:
            self.go(CLOSED)

    @invariant()
    def they_agree(self) -> None:
        circuit = self.circuit
        assert circuit.state is self.state
        assert circuit.room(self.now) == self.free()
        assert circuit.next_at == (self.until if self.state is OPEN else None)
        limits = {CLOSED: None, OPEN: 0, HALF_OPEN: self.breaker.probes, RECOVERING: self.limit}
        assert circuit.snapshot() == CircuitStatistics(
            state=self.state,
            calls=self.counted[0],
            failures=self.counted[1],
            in_flight=len(self.live),
            limit=limits[self.state],
            since=self.since,
        )
        assert len(self.changes) == self.moves

    @invariant()
    def promises(self) -> None:
        young = self.live.count(self.generation)
        if self.state is OPEN:
            assert young == 0
        if self.state is HALF_OPEN:
            assert young + self.counted[0] <= self.breaker.probes
        if self.state is RECOVERING:
            assert young <= self.limit

    def teardown(self) -> None:
        if hasattr(self, "changes"):
            assert set(self.changes) <= ALLOWED
            assert all(one[1] is other[0] for one, other in pairwise(self.changes))


TestCircuitAgainstLists = CircuitAgainstLists.TestCase
TestCircuitAgainstLists.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def start(circuit: Circuit, now: float, calls: int) -> int:
    """Start this many calls; their generation."""
    for _ in range(calls):
        assert circuit.admit(now)
    return circuit.generation


def opened(breaker: Breaker = SMALL, now: float = 0.0) -> Circuit:
    circuit = Circuit(breaker)
    generation = start(circuit, now, breaker.minimum)
    for _ in range(breaker.minimum):
        circuit.failed(now, generation)
    assert circuit.state is OPEN
    return circuit


def recovering(breaker: Breaker = SMALL) -> Circuit:
    """Opened at 0, half-open at 5, recovering at 6."""
    circuit = opened(breaker)
    generation = start(circuit, 5.0, breaker.probes)
    for _ in range(breaker.probes):
        circuit.succeeded(6.0, generation)
    assert circuit.state is RECOVERING
    return circuit


def test_a_new_circuit_is_closed_and_admits_any_number() -> None:
    circuit = Circuit(Breaker())
    assert (circuit.state, circuit.room(0.0), circuit.next_at) == (CLOSED, None, None)
    start(circuit, 0.0, 10_000)
    assert circuit.snapshot() == CircuitStatistics(
        state=CLOSED, calls=0, failures=0, in_flight=10_000, limit=None, since=None
    )


def test_it_opens_at_the_failure_rate_and_not_below_it() -> None:
    for failures, state in ((2, CLOSED), (3, OPEN)):
        circuit = Circuit(Breaker(failure_rate=0.3, minimum=10))
        generation = start(circuit, 0.0, 10)
        for _ in range(10 - failures):
            circuit.succeeded(0.0, generation)
        for _ in range(failures):
            circuit.failed(0.0, generation)
        assert circuit.state is state


@pytest.mark.parametrize("rate", [n / 10 for n in range(1, 11)])
def test_a_rate_is_met_exactly_whatever_its_binary_digits(rate: float) -> None:
    circuit = Circuit(Breaker(failure_rate=rate, minimum=10))
    generation = start(circuit, 0.0, 10)
    failures = round(10 * rate)
    for number in range(10):
        assert circuit.state is CLOSED
        (circuit.succeeded if number < 10 - failures else circuit.failed)(0.0, generation)
    assert circuit.state is OPEN


def test_it_does_not_open_before_the_minimum_of_calls() -> None:
    circuit = Circuit(SMALL)
    generation = start(circuit, 0.0, 4)
    for _ in range(3):
        circuit.failed(0.0, generation)
    assert circuit.state is CLOSED
    circuit.failed(0.0, generation)
    assert circuit.state is OPEN


def test_a_success_never_opens_it() -> None:
    circuit = Circuit(SMALL)
    generation = start(circuit, 0.0, 5)
    for _ in range(3):
        circuit.failed(0.0, generation)
    circuit.succeeded(0.0, generation)
    assert circuit.state is CLOSED
    circuit.failed(0.0, generation)
    assert circuit.state is OPEN


def test_failures_older_than_the_window_do_not_count() -> None:
    circuit = Circuit(SMALL)
    generation = start(circuit, 0.0, 5)
    for _ in range(3):
        circuit.failed(0.0, generation)
    circuit.failed(10.0, generation)
    assert circuit.state is CLOSED
    assert (circuit.snapshot().calls, circuit.snapshot().failures) == (1, 1)


def test_failures_within_nine_tenths_of_the_window_always_count() -> None:
    for begin in (0.0, 0.4, 0.99):
        circuit = Circuit(SMALL)
        generation = start(circuit, begin, 4)
        for number in range(4):
            circuit.failed(begin + 3.0 * number, generation)
        assert circuit.state is OPEN


def test_breaker_window_slides_for_hours() -> None:
    circuit = Circuit(Breaker(failure_rate=1.0, minimum=10**6))
    rng = random.Random(7)
    now, ended = 12_345.678, []
    for _ in range(1000):
        now += rng.choice([0.0, 0.01, 0.1, 1.0, 1.0, 30.0])
        failure = rng.random() < 0.5
        (circuit.failed if failure else circuit.succeeded)(now, start(circuit, now, 1))
        ended.append((now, failure))
        recent = [failed for time, failed in ended if time // 1.0 > now // 1.0 - 10]
        assert (circuit.snapshot().calls, circuit.snapshot().failures) == (len(recent), sum(recent))


def test_while_open_no_call_is_admitted() -> None:
    circuit = opened(now=100.0)
    for now in (100.0, 101.0, 104.999):
        assert not circuit.admit(now)
        assert circuit.room(now) == 0
    assert circuit.next_at == 105.0
    assert circuit.state is OPEN


def test_breaker_admits_the_set_number_of_probes() -> None:
    circuit = opened()
    assert circuit.room(5.0) == 3
    assert circuit.state is OPEN, "to ask for room changes nothing"
    start(circuit, 5.0, 3)
    assert circuit.state is HALF_OPEN
    assert circuit.next_at is None
    for now in (5.0, 100.0):
        assert not circuit.admit(now)
        assert circuit.room(now) == 0


def test_probes_that_fail_open_it_again_for_as_long() -> None:
    circuit = opened()
    generation = start(circuit, 5.0, 3)
    circuit.failed(6.0, generation)
    circuit.failed(6.0, generation)
    assert circuit.state is HALF_OPEN, "not all of them have ended"
    circuit.succeeded(7.0, generation)
    assert circuit.state is OPEN
    assert circuit.next_at == 12.0
    assert not circuit.admit(11.9)


def test_probes_below_the_rate_are_good_enough() -> None:
    circuit = opened()
    generation = start(circuit, 5.0, 3)
    circuit.failed(6.0, generation)
    circuit.succeeded(6.0, generation)
    circuit.succeeded(60.0, generation)  # a probe does not leave the window
    assert circuit.state is RECOVERING
    assert circuit.snapshot() == CircuitStatistics(
        state=RECOVERING, calls=0, failures=0, in_flight=0, limit=3, since=60.0
    )


def test_probes_may_come_one_after_another() -> None:
    circuit = opened()
    for now in (5.0, 50.0, 500.0):
        circuit.succeeded(now + 1, start(circuit, now, 1))
    assert circuit.state is RECOVERING


def test_a_dropped_probe_gives_its_permit_back() -> None:
    circuit = opened()
    generation = start(circuit, 5.0, 3)
    circuit.dropped(6.0, generation)
    assert circuit.state is HALF_OPEN
    assert circuit.room(6.0) == 1
    start(circuit, 6.0, 1)
    assert not circuit.admit(6.0)
    for _ in range(3):
        circuit.succeeded(7.0, generation)
    assert circuit.state is RECOVERING


def test_dropped_calls_say_nothing_of_the_stage() -> None:
    circuit = Circuit(SMALL)
    generation = start(circuit, 0.0, 10)
    for _ in range(10):
        circuit.dropped(0.0, generation)
    assert circuit.snapshot() == CircuitStatistics(
        state=CLOSED, calls=0, failures=0, in_flight=0, limit=None, since=None
    )


@pytest.mark.parametrize("end", ["succeeded", "failed", "dropped"])
def test_breaker_ignores_results_from_before_it_opened(end: str) -> None:
    circuit = Circuit(SMALL)
    old = start(circuit, 0.0, 10)
    for _ in range(4):
        circuit.failed(0.0, old)
    assert circuit.snapshot().in_flight == 6
    ended = getattr(circuit, end)
    ended(1.0, old)
    assert (circuit.state, circuit.next_at, circuit.snapshot().in_flight) == (OPEN, 5.0, 5)
    young = start(circuit, 5.0, 3)
    assert young != old
    for _ in range(3):
        ended(5.0, old)
    assert (circuit.state, circuit.room(5.0), circuit.snapshot().in_flight) == (HALF_OPEN, 0, 5)
    for _ in range(3):
        circuit.succeeded(6.0, young)
    ended(6.0, old)
    assert circuit.snapshot() == CircuitStatistics(
        state=RECOVERING, calls=0, failures=0, in_flight=1, limit=3, since=6.0
    )


def test_breaker_recovers_despite_hanging_earlier_calls() -> None:
    circuit = Circuit(SMALL)
    old = start(circuit, 0.0, 500)
    for _ in range(4):
        circuit.failed(0.0, old)
    young = start(circuit, 5.0, 3)
    for _ in range(3):
        circuit.succeeded(5.0, young)
    assert circuit.room(5.0) == 3


def test_recovery_is_a_trickle_that_doubles_each_round_trip() -> None:
    circuit = recovering()
    now, rounds = 6.0, []
    while circuit.state is RECOVERING:
        calls = 0
        while calls < 1000 and circuit.admit(now):
            calls += 1
        assert circuit.snapshot().in_flight == calls == circuit.snapshot().limit
        rounds.append(calls)
        now += 1.0
        for _ in range(calls):
            circuit.succeeded(now, circuit.generation)
    assert rounds == [3, 6, 12, 24, 48, 96]
    assert (circuit.state, circuit.room(now)) == (CLOSED, None)


def test_recovery_ends_when_the_limit_is_64_times_the_probes() -> None:
    circuit = recovering()
    successes = 0
    while circuit.state is RECOVERING:
        circuit.succeeded(6.0, start(circuit, 6.0, 1))
        successes += 1
    assert successes == 64 * 3 - 3


def test_recovery_ends_without_waiting_lanes() -> None:
    circuit = recovering()
    circuit.nobody_waits(9.0)
    assert (circuit.state, circuit.snapshot().since) == (CLOSED, 9.0)


def test_missing_waiters_change_no_other_state() -> None:
    circuit = Circuit(SMALL)
    circuit.nobody_waits(0.0)
    assert circuit.state is CLOSED
    circuit = opened()
    circuit.nobody_waits(1.0)
    assert circuit.state is OPEN
    start(circuit, 5.0, 1)
    circuit.nobody_waits(5.0)
    assert circuit.state is HALF_OPEN


def test_breaker_in_recovery_reopens_after_few_failures() -> None:
    circuit = recovering(Breaker(minimum=20, probes=3))
    generation = start(circuit, 6.0, 3)
    circuit.succeeded(7.0, generation)
    circuit.failed(7.0, generation)
    assert circuit.state is RECOVERING
    circuit.failed(7.0, generation)
    assert (circuit.state, circuit.next_at) == (OPEN, 12.0)


def test_once_closed_the_minimum_holds_again() -> None:
    circuit = recovering(Breaker(minimum=20, probes=3))
    circuit.nobody_waits(6.0)
    generation = start(circuit, 6.0, 20)
    for _ in range(19):
        circuit.failed(6.0, generation)
    assert circuit.state is CLOSED
    circuit.failed(6.0, generation)
    assert circuit.state is OPEN


def test_every_transition_is_reported_once_and_after_it_happened() -> None:
    seen: list[tuple[CircuitState, CircuitState]] = []

    def changed(old: CircuitState, new: CircuitState) -> None:
        assert circuit.state is new
        seen.append((old, new))

    circuit = Circuit(Breaker(minimum=1, probes=1), changed)
    circuit.failed(0.0, start(circuit, 0.0, 1))
    circuit.failed(5.0, start(circuit, 5.0, 1))
    circuit.succeeded(10.0, start(circuit, 10.0, 1))
    circuit.nobody_waits(10.0)
    assert seen == [
        (CLOSED, OPEN),
        (OPEN, HALF_OPEN),
        (HALF_OPEN, OPEN),
        (OPEN, HALF_OPEN),
        (HALF_OPEN, RECOVERING),
        (RECOVERING, CLOSED),
    ]


@pytest.mark.parametrize("rate", [0, -0.5, 1.1, math.nan, math.inf, "0.5", None])
def test_failure_rates_that_make_no_sense_are_refused(rate: Any) -> None:
    with pytest.raises(SettingsError, match=r"Breaker\(failure_rate=.*more than 0 and at most 1"):
        Breaker(failure_rate=rate)


@pytest.mark.parametrize("name", ["window", "open_for"])
@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, "10", None])
def test_times_that_make_no_sense_are_refused(name: str, seconds: Any) -> None:
    with pytest.raises(SettingsError, match=rf"Breaker\({name}=.*seconds, more than 0"):
        Breaker(**{name: seconds})


@pytest.mark.parametrize("name", ["minimum", "probes"])
@pytest.mark.parametrize("count", [0, -1, 2.5, math.nan, "3", None, True])
def test_counts_that_make_no_sense_are_refused(name: str, count: Any) -> None:
    with pytest.raises(SettingsError, match=rf"Breaker\({name}=.*at least 1"):
        Breaker(**{name: count})


def test_breaker_of_a_busy_stage_opens_after_a_streak() -> None:
    circuit = Circuit(Breaker(minimum=20))
    for _ in range(10_000):
        assert circuit.admit(1.0)
        circuit.succeeded(1.0, circuit.generation)
    for _ in range(19):
        assert circuit.admit(2.0)
        circuit.failed(2.0, circuit.generation)
    assert circuit.state is CLOSED
    assert circuit.admit(2.0)
    circuit.failed(2.0, circuit.generation)
    assert circuit.state is OPEN
