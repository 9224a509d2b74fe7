from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.testing import (
    CheckFailed,
    EventKind,
    Flaw,
    History,
    HistoryEvent,
    Sent,
    Verdict,
    Violation,
    check,
    check_results,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

A, B = b"a", b"b"


class Run:
    """Writes a history by hand: every event one second after the one before."""

    def __init__(self) -> None:
        self.events: list[HistoryEvent] = []
        self.sent: dict[tuple[int, int], bytes | None] = {}

    def send(self, key: bytes | None, *offsets: int, partition: int = 0) -> Run:
        self.sent.update({(partition, offset): key for offset in offsets})
        return self

    def start(self, offset: int, *, owner: str = "p1", attempt: int = 1, partition: int = 0) -> Run:
        return self._add(EventKind.START, offset, owner, attempt, partition, None)

    def end(
        self, offset: int, outcome: str = "ok", *, owner: str = "p1", attempt: int = 1, partition: int = 0
    ) -> Run:
        return self._add(EventKind.END, offset, owner, attempt, partition, outcome)

    def ran(
        self, offset: int, outcome: str = "ok", *, owner: str = "p1", attempt: int = 1, partition: int = 0
    ) -> Run:
        self.start(offset, owner=owner, attempt=attempt, partition=partition)
        return self.end(offset, outcome, owner=owner, attempt=attempt, partition=partition)

    def _add(
        self, kind: EventKind, offset: int, owner: str, attempt: int, partition: int, outcome: str | None
    ) -> Run:
        seq = len(self.events) * 1_000_000_000
        key = self.sent.get((partition, offset))
        self.events.append(
            HistoryEvent(kind, key, partition, offset, attempt, owner, seq / 1e9, seq, outcome)
        )
        return self

    @property
    def history(self) -> History:
        return History(events=tuple(self.events))

    def check(self, **options: object) -> Verdict:
        return check(self.history, sent=self.sent, **options)  # type: ignore[arg-type]


def flaws(verdict: Verdict) -> set[Flaw]:
    assert set(verdict.tally) == {violation.flaw for violation in verdict.violations}
    assert verdict.ok == (not verdict.tally)
    return set(verdict.tally)


# -- what must pass ------------------------------------------------------------------------------------------------


def test_a_lane_that_runs_one_after_another_is_ok() -> None:
    verdict = Run().send(A, 0, 1, 5).ran(0).ran(1).ran(5).check()
    verdict.raise_if_bad()
    assert verdict.ok
    assert verdict.affinity == 1.0
    assert (verdict.counts.messages, verdict.counts.attempts, verdict.counts.keys) == (3, 3, 1)
    assert str(verdict).startswith("ok: 3 of 3 messages")


def test_lanes_may_overlap_each_other() -> None:
    run = Run().send(A, 0, 2).send(B, 1, 3)
    run.start(1).start(0).end(0).start(2).end(1).end(2).ran(3)
    assert run.check().ok


def test_retries_before_the_next_message_are_ok_and_counted() -> None:
    run = Run().send(A, 0, 1).ran(0, "failed").ran(0, "retry", attempt=2).ran(0, attempt=3).ran(1)
    verdict = run.check()
    assert verdict.ok
    assert verdict.counts.retried == 1
    assert verdict.counts.attempts == 4


@pytest.mark.parametrize("outcome", ["ok", "dead", "skipped", "parked"])
def test_final_outcomes_finish_a_message(outcome: str) -> None:
    assert Run().send(A, 0, 1).ran(0, outcome).ran(1).check().ok


def test_a_dead_letter_known_from_its_topic_finishes_a_message() -> None:
    run = Run().send(A, 0, 1, 2).ran(0, "failed").ran(0, "failed", attempt=2).ran(1).ran(2)
    assert flaws(run.check()) == {Flaw.ORDER, Flaw.LOST}
    assert run.check(finished={(0, 0)}).ok


def test_a_message_that_never_ran_can_be_finished_by_declaration() -> None:
    run = Run().send(A, 0, 1, 2).ran(0).ran(2)
    assert run.check(finished={(0, 1)}).ok


def test_duplicate_is_finished_with_the_message_it_repeats() -> None:
    run = Run().send(A, 0, 1, 2).ran(0).ran(2)
    assert flaws(run.check()) == {Flaw.ORDER, Flaw.LOST}
    assert run.check(duplicates={(0, 1): (0, 0)}).ok


def test_a_lane_may_move_to_another_owner_between_messages() -> None:
    verdict = Run().send(A, 0, 1).send(B, 2).ran(0, owner="p1").ran(1, owner="p2").ran(2, owner="p2").check()
    assert verdict.ok
    assert verdict.affinity == 0.5
    assert verdict.counts.owners == 2


def test_attempt_cut_off_by_a_crash_does_not_overlap() -> None:
    run = Run().send(A, 0, 1).ran(0, owner="p1").start(1, owner="p1").ran(1, owner="p2")
    assert run.check().ok


def test_a_replay_after_a_crash_is_ok_when_repeats_are_allowed() -> None:
    run = Run().send(A, 0, 1, 2, 3)
    run.ran(0).ran(1).ran(2).start(3)
    run.ran(1, owner="p2").ran(2, owner="p2").ran(3, owner="p2")
    assert flaws(run.check()) == {Flaw.REPEAT}
    verdict = run.check(allow_repeats=1)
    assert verdict.ok
    assert verdict.repeats == 2


def test_replay_may_leave_out_committed_messages() -> None:
    run = Run().send(A, 0, 1, 2).ran(0).ran(1).ran(2).ran(0, owner="p2").ran(2, owner="p2")
    assert run.check(allow_repeats=1).ok


def test_a_replay_of_a_dead_letter_is_a_repeat() -> None:
    run = Run().send(A, 0, 1).ran(0, "failed").ran(0, "failed", attempt=2).ran(1)
    run.ran(0, "failed", owner="p2").ran(0, "failed", attempt=2, owner="p2").ran(1, owner="p2")
    assert flaws(run.check(finished={(0, 0)})) == {Flaw.REPEAT}
    verdict = run.check(finished={(0, 0)}, allow_repeats=1)
    assert verdict.ok
    assert verdict.repeats == 2


def test_replay_of_a_message_that_was_passed_may_retry() -> None:
    """A message counted as done after one attempt, and a crash aborted that: it begins again, and needs two."""
    run = Run().send(A, 0, 1).ran(0, "failed").ran(1)
    run.ran(0, "failed", owner="p2").ran(0, attempt=2, owner="p2").ran(1, owner="p2")
    verdict = run.check(finished={(0, 0)}, allow_repeats=1)
    assert verdict.ok
    assert verdict.repeats == 2


def test_keyless_messages_have_no_lane() -> None:
    run = Run().send(None, 0, 1).send(A, 2, 3)
    run.start(1).start(0).end(0).end(1).ran(2).ran(3)
    assert run.check().ok


def test_one_key_in_two_partitions_has_an_order_in_each() -> None:
    run = Run().send(A, 7, 8).send(A, 0, 1, partition=1)
    run.ran(7).ran(0, partition=1).ran(8).ran(1, partition=1)
    assert run.check().ok


def test_messages_without_an_order_may_run_at_any_time() -> None:
    run = Run().send(A, 0, 1).start(1).start(0).end(1).end(0)
    assert run.check(order="none").ok


def test_sent_messages_can_be_given_as_a_list() -> None:
    run = Run().send(A, 0, 1).ran(0).ran(1)
    assert check(run.history, sent=[Sent(A, 0, 0), Sent(A, 0, 1)]).ok


# -- what must fail ------------------------------------------------------------------------------------------------


def test_two_attempts_of_a_lane_at_once_overlap() -> None:
    run = Run().send(A, 0, 1).start(0).start(1, owner="p2").end(0).end(1, owner="p2")
    assert Flaw.OVERLAP in flaws(run.check())


def test_two_owners_of_one_message_at_once_overlap() -> None:
    run = Run().send(A, 0, 1).start(0).start(0, owner="p2").end(0).end(0, owner="p2").ran(1)
    assert flaws(run.check(allow_repeats=1)) == {Flaw.OVERLAP}


def test_owner_that_starts_twice_overlaps_itself() -> None:
    run = Run().send(A, 0, 1).start(0).start(0, attempt=2).end(0, attempt=2).ran(1)
    assert flaws(run.check()) == {Flaw.OVERLAP}


def test_open_attempt_of_a_live_owner_overlaps() -> None:
    run = Run().send(A, 0, 1).send(B, 2)
    run.start(0, owner="p1").ran(0, owner="p2").ran(2, owner="p1").ran(1, owner="p2")
    assert flaws(run.check()) == {Flaw.OVERLAP}


def test_one_key_in_two_partitions_overlaps() -> None:
    run = Run().send(A, 0, 1).send(A, 0, partition=1)
    run.start(0).ran(0, partition=1).end(0).ran(1)
    assert flaws(run.check()) == {Flaw.OVERLAP}


def test_a_later_message_first_is_out_of_order() -> None:
    run = Run().send(A, 0, 1).ran(1).ran(0)
    assert flaws(run.check()) == {Flaw.ORDER}


def test_a_message_that_overtakes_a_retry_is_out_of_order() -> None:
    run = Run().send(A, 0, 1).ran(0, "failed").ran(1).ran(0, attempt=2)
    assert flaws(run.check()) == {Flaw.ORDER}


def test_overtaking_a_retry_of_a_dead_letter_is_out_of_order() -> None:
    run = Run().send(A, 0, 1, 2).ran(0, "failed").ran(1).ran(0, "failed", attempt=2).ran(2)
    assert flaws(run.check(finished={(0, 0)})) == {Flaw.ORDER}
    run = Run().send(A, 0, 1, 2).ran(0, "failed").ran(1)
    run.ran(0, "failed", attempt=2, owner="p2").ran(2, owner="p2")
    assert flaws(run.check(finished={(0, 0)})) == {Flaw.ORDER}


def test_message_skipped_after_a_crash_is_lost_and_out_of_order() -> None:
    run = Run().send(A, 0, 1).start(0, owner="p1").ran(1, owner="p2")
    assert flaws(run.check()) == {Flaw.ORDER, Flaw.LOST}


def test_a_replay_that_goes_back_and_forth_is_out_of_order() -> None:
    run = Run().send(A, 0, 1, 2).ran(0).ran(1).ran(2).ran(1, owner="p2").ran(0, owner="p2").ran(2, owner="p2")
    assert flaws(run.check(allow_repeats=1)) == {Flaw.ORDER}


def test_an_owner_that_goes_back_without_a_crash_is_out_of_order() -> None:
    run = Run().send(A, 0, 1).ran(0).ran(1).ran(0)
    assert flaws(run.check(allow_repeats=1)) == {Flaw.ORDER}


def test_a_partition_in_order_has_one_lane() -> None:
    run = Run().send(A, 0, 2).send(None, 1, 3).start(0).start(1).end(0).end(1).ran(2).ran(3)
    assert run.check().ok
    assert Flaw.OVERLAP in flaws(run.check(order="partition"))
    run = Run().send(A, 0, 2).send(B, 1).ran(1).ran(0).ran(2)
    assert run.check().ok
    assert flaws(run.check(order="partition")) == {Flaw.ORDER}


def test_a_global_order_has_one_lane_over_all_partitions() -> None:
    run = Run().send(A, 0, 1).send(B, 0, partition=1).start(0).ran(0, partition=1).end(0).ran(1)
    assert run.check(order="partition").ok
    assert flaws(run.check(order="global")) == {Flaw.OVERLAP}


@pytest.mark.parametrize("outcome", ["failed", "retry", "cancelled", "something else"])
def test_a_message_without_a_final_end_is_lost(outcome: str) -> None:
    verdict = Run().send(A, 0, 1, 2).ran(0).ran(1).ran(2, outcome).check()
    assert flaws(verdict) == {Flaw.LOST}
    assert verdict.lost == (Sent(A, 0, 2),)


def test_a_message_that_never_started_is_lost() -> None:
    verdict = Run().send(A, 0, 1, 2).send(None, 9).ran(0).ran(1).check()
    assert flaws(verdict) == {Flaw.LOST}
    assert verdict.lost == (Sent(A, 0, 2), Sent(None, 0, 9))


def test_a_message_that_finished_twice_is_a_repeat() -> None:
    run = Run().send(A, 0, 1).ran(0).ran(0, owner="p2").ran(0, owner="p3").ran(1, owner="p3")
    assert flaws(run.check(allow_repeats=1)) == {Flaw.REPEAT}
    assert run.check(allow_repeats=2).ok


def test_a_duplicate_that_ran_is_found() -> None:
    verdict = Run().send(A, 0, 1, 2).ran(0).ran(1).ran(2).check(duplicates={(0, 1): (0, 0)})
    assert flaws(verdict) == {Flaw.DUPLICATE}
    assert "a duplicate of offset 0 ran" in str(verdict)


def test_a_duplicate_does_not_finish_the_message_it_repeats() -> None:
    run = Run().send(A, 0, 1, 2).ran(0).ran(1, "retry")
    verdict = run.check(duplicates={(0, 2): (0, 1)})
    assert flaws(verdict) == {Flaw.LOST}
    assert verdict.lost == (Sent(A, 0, 1),)


def test_repeats_are_found_without_an_order() -> None:
    run = Run().send(None, 0, 1).ran(0).ran(1).ran(0)
    assert flaws(run.check(order="none")) == {Flaw.REPEAT}


def test_message_that_was_not_sent_is_unknown() -> None:
    run = Run().send(A, 0, 1).ran(0).ran(1).ran(99)
    assert flaws(run.check()) == {Flaw.UNKNOWN}
    run = Run().send(A, 0, 1).ran(0).ran(1)
    run.sent[0, 1] = B
    assert flaws(run.check()) >= {Flaw.UNKNOWN, Flaw.LOST}


def test_an_end_without_a_start_is_stray() -> None:
    run = Run().send(A, 0, 1).ran(0).end(1)
    assert flaws(run.check()) >= {Flaw.STRAY, Flaw.LOST}


def test_a_history_that_proves_nothing_is_too_thin() -> None:
    assert flaws(Run().check()) == {Flaw.THIN}
    assert Flaw.THIN in flaws(Run().send(A, 0, 1).check())
    assert flaws(Run().send(A, 0).send(B, 1).ran(0).ran(1).check()) == {Flaw.THIN}
    assert flaws(Run().send(None, 0, 1).ran(0).ran(1).check()) == {Flaw.THIN}
    assert Flaw.THIN in flaws(Run().send(A, *range(10)).ran(0).ran(1).check())
    assert Flaw.THIN not in flaws(Run().send(A, *range(10)).ran(0).ran(1).check(min_seen=0.1))


def test_unknown_ordering_is_refused() -> None:
    with pytest.raises(ValueError, match="'alphabetical'"):
        Run().check(order="alphabetical")


# -- its report ----------------------------------------------------------------------------------------------------


def test_bad_verdict_shows_the_first_violation_with_its_timeline() -> None:
    run = Run().send(A, 0, 1).send(B, 2).ran(0, "failed").ran(2).ran(1).ran(0, attempt=2)
    with pytest.raises(CheckFailed) as failed:
        run.check().raise_if_bad()
    assert str(failed.value).splitlines() == [
        "found 2 order (3 of 3 messages, 4 attempts, 2 keys, 1 owners, 1 retried, 0 repeats, 0 lost, affinity 1.000)",
        "order in the lane of key b'a' at partition 0 offset 1: started while offset 0 was not finished",
        "       +0.000000 s  p1  start  0@0 attempt 1",
        "       +1.000000 s  p1  end    0@0 attempt 1  failed",
        "  >    +4.000000 s  p1  start  0@1 attempt 1",
        "       +5.000000 s  p1  end    0@1 attempt 1  ok",
        "       +6.000000 s  p1  start  0@0 attempt 2",
        "       +7.000000 s  p1  end    0@0 attempt 2  ok",
    ]


def test_violations_are_all_counted_and_few_are_kept() -> None:
    run = Run().send(A, *range(1000))
    for offset in range(0, 1000, 2):
        run.ran(offset + 1).ran(offset)
    verdict = run.check()
    assert verdict.tally[Flaw.ORDER] == 1000
    assert len(verdict.violations) == 10
    assert all(len(violation.timeline) <= 13 for violation in verdict.violations)


# -- any correct schedule passes, any mutated one does not ---------------------------------------------------------


class Schedule:
    """A correct run: lanes interleaved, retries, moves between owners, and crashes if asked for."""

    def __init__(self, random: Random, *, crashes: int) -> None:
        self.run = run = Run()
        for offset in range(random.randint(8, 40)):
            run.send(random.choice([b"a", b"b", b"c", None]), offset // 2, partition=offset % 2)
        run.send(A, 100, 101, 102)  # whichever one is dropped, two of a key are left: never too thin
        lanes: dict[object, list[tuple[int, int]]] = {}
        for (partition, offset), key in sorted(run.sent.items()):
            lane = (partition, offset) if key is None else (key, partition)
            lanes.setdefault(lane, []).append((partition, offset))
        self.lanes = list(lanes.values())
        # The lanes of one key in two partitions never run at once: they are one after the other here.
        self.queues: dict[object, list[tuple[int, int]]] = {}
        for name, positions in lanes.items():
            assert isinstance(name, tuple)
            self.queues.setdefault(name[0] if isinstance(name[0], bytes) else name, []).extend(positions)
        done: dict[object, int] = dict.fromkeys(self.queues, 0)
        self.owner = 0
        for _ in range(crashes):
            self._epoch(random, done, steps=random.randint(0, 30))
            for name, count in done.items():  # a crash: some of what was finished is not recorded as done
                done[name] = random.randint(max(0, count - 3), count)
        self._epoch(random, done, steps=None)

    def _epoch(self, random: Random, done: dict[object, int], steps: int | None) -> None:
        self.owner += 1
        owners = {name: f"p{self.owner}-{random.randint(0, 1)}" for name in self.queues}
        running: dict[object, int] = {}
        while any(done[name] < len(queue) for name, queue in self.queues.items()):
            if steps is not None:
                if not steps:
                    return  # killed: what is running stays open
                steps -= 1
            name = random.choice([name for name, queue in self.queues.items() if done[name] < len(queue)])
            partition, offset = self.queues[name][done[name]]
            attempt = abs(running.get(name, 0))
            if running.get(name, 0) <= 0:
                running[name] = attempt + 1
                self.run.start(offset, owner=owners[name], attempt=attempt + 1, partition=partition)
            elif attempt < 4 and random.randrange(4) == 3:
                running[name] = -attempt
                self.run.end(offset, "failed", owner=owners[name], attempt=attempt, partition=partition)
            else:
                running.pop(name)
                done[name] += 1
                self.run.end(offset, owner=owners[name], attempt=attempt, partition=partition)


def renumbered(events: Iterable[HistoryEvent]) -> History:
    return History(events=tuple(event._replace(seq=number) for number, event in enumerate(events)))


def attempts_of(run: Run, position: tuple[int, int]) -> list[HistoryEvent]:
    return [event for event in run.events if (event.partition, event.offset) == position]


RANDOMS = st.randoms(use_true_random=False)


@settings(max_examples=150, deadline=None)
@given(random=RANDOMS, crashes=st.integers(0, 3))
def test_any_correct_schedule_passes(random: Random, crashes: int) -> None:
    run = Schedule(random, crashes=crashes).run
    verdict = run.check(allow_repeats=crashes)
    verdict.raise_if_bad()
    if not crashes:
        assert verdict.repeats == 0


def neighbours(random: Random, schedule: Schedule) -> tuple[tuple[int, int], tuple[int, int]]:
    lane = random.choice([lane for lane in schedule.lanes if len(lane) > 1])
    place = random.randrange(len(lane) - 1)
    return lane[place], lane[place + 1]


@settings(max_examples=100, deadline=None)
@given(random=RANDOMS)
def test_two_messages_swapped_are_out_of_order(random: Random) -> None:
    schedule = Schedule(random, crashes=0)
    first, second = neighbours(random, schedule)
    offsets = {first: second[1], second: first[1]}
    events = [
        event._replace(offset=offsets.get((event.partition, event.offset), event.offset))
        for event in schedule.run.events
    ]
    assert flaws(check(renumbered(events), sent=schedule.run.sent)) == {Flaw.ORDER}


@settings(max_examples=100, deadline=None)
@given(random=RANDOMS)
def test_a_dropped_message_is_lost(random: Random) -> None:
    schedule = Schedule(random, crashes=0)
    run = schedule.run
    dropped = random.choice(sorted(run.sent))
    events = [event for event in run.events if (event.partition, event.offset) != dropped]
    verdict = check(renumbered(events), sent=run.sent)
    assert flaws(verdict) - {Flaw.ORDER} == {Flaw.LOST}
    assert verdict.lost == (Sent(run.sent[dropped], *dropped),)


@settings(max_examples=100, deadline=None)
@given(random=RANDOMS)
def test_start_before_the_end_of_its_predecessor_overlaps(random: Random) -> None:
    schedule = Schedule(random, crashes=0)
    run = schedule.run
    first, second = neighbours(random, schedule)
    end, start = attempts_of(run, first)[-1], attempts_of(run, second)[0]
    events = [event for event in run.events if event is not start]
    events.insert(events.index(end), start)
    assert flaws(check(renumbered(events), sent=run.sent)) == {Flaw.OVERLAP, Flaw.ORDER}


@settings(max_examples=100, deadline=None)
@given(random=RANDOMS)
def test_a_message_that_ran_twice_is_a_repeat(random: Random) -> None:
    run = Schedule(random, crashes=0).run
    doubled = random.choice(sorted(run.sent))
    again = [event._replace(owner="p9") for event in attempts_of(run, doubled)]
    history = renumbered([*run.events, *again])
    assert flaws(check(history, sent=run.sent)) == {Flaw.REPEAT}
    verdict = check(history, sent=run.sent, allow_repeats=1)
    assert verdict.ok
    assert verdict.repeats == 1


# -- results -------------------------------------------------------------------------------------------------------

SENT = [(A, 1), (B, 1), (A, 2), (None, 7), (A, 3), (None, 8)]


def test_results_in_the_order_of_their_keys_are_ok() -> None:
    results = check_results(SENT, [(B, 1), (None, 8), (A, 1), (None, 7), (A, 2), (A, 3)])
    results.raise_if_bad()
    assert (results.inputs, results.outputs, results.duplicates, results.missing) == (6, 6, 0, 0)
    assert str(results).startswith("ok: 6 results of 6 messages")


def test_results_out_of_order_show_the_first_difference() -> None:
    results = check_results(SENT, [(A, 1), (A, 3), (A, 2), (B, 1), (None, 7), (None, 8)])
    assert results.tally == {Flaw.ORDER: 1}
    with pytest.raises(
        CheckFailed, match=r"expected a result for 2, got 3\n +sent +\[1, 2, 3\]\n +results \[1, 3, 2\]"
    ):
        results.raise_if_bad()


def test_missing_results_are_lost() -> None:
    results = check_results(SENT, [(A, 1), (A, 3), (None, 7)])
    assert results.tally == {Flaw.LOST: 3}
    assert results.missing == 3


def test_duplicates_are_counted_and_a_violation_unless_allowed() -> None:
    output = [(A, 1), (A, 2), (A, 1), (A, 2), (A, 3), (B, 1), (None, 7), (None, 8), (None, 8)]
    results = check_results(SENT, output)
    assert results.tally == {Flaw.REPEAT: 3}
    assert results.duplicates == 3
    assert check_results(SENT, output, allow_duplicates=True).ok


def test_results_without_an_input_are_unknown() -> None:
    results = check_results(SENT, [*SENT, (B, 2), (b"z", 1)])
    assert results.tally == {Flaw.UNKNOWN: 2}


def test_an_id_that_was_sent_twice_counts_once() -> None:
    assert check_results([*SENT, (A, 1)], SENT).ok


def test_results_that_prove_nothing_are_too_thin() -> None:
    assert check_results([], []).tally == {Flaw.THIN: 1}
    assert check_results([(A, 1), (B, 1)], [(A, 1), (B, 1)]).tally == {Flaw.THIN: 1}


@settings(max_examples=100, deadline=None)
@given(random=RANDOMS)
def test_interleaved_lanes_are_ok_and_swaps_inside_one_are_not(random: Random) -> None:
    records = [(random.choice([A, B]), number) for number in range(random.randint(5, 40))] + [
        (A, 90),
        (A, 91),
    ]
    queues = {key: [record for record in records if record[0] == key] for key in (A, B)}
    output = []
    while left := [queue for queue in queues.values() if queue]:
        output.append(random.choice(left).pop(0))
    assert check_results(records, output).ok
    places = [place for place, (key, _) in enumerate(output) if key == A]
    first, second = random.sample(places, 2)
    output[first], output[second] = output[second], output[first]
    assert check_results(records, output).tally == {Flaw.ORDER: 1}


# -- lanes that run by versions --------------------------------------------------------------------------------------


def by_version(**versions: int) -> dict[tuple[int, int], int]:
    return {(0, int(name[1:])): version for name, version in versions.items()}


def test_ascending_versions_are_ok_in_any_order_of_offsets() -> None:
    run = Run().send(A, 0, 1, 2).ran(0).ran(2).ran(1)
    assert flaws(run.check()) == {Flaw.ORDER}
    assert run.check(versions=by_version(o0=1, o1=3, o2=2)).ok


def test_version_that_runs_before_a_missing_one_is_found() -> None:
    run = Run().send(A, 0, 1, 2).ran(0).ran(1).ran(2)
    verdict = run.check(versions=by_version(o0=1, o1=3, o2=2))
    assert flaws(verdict) == {Flaw.ORDER}
    assert "started while version 2 (offset 2) was not finished" in str(verdict)


def test_an_owner_that_goes_back_to_a_lower_version_is_found() -> None:
    run = Run().send(A, 0, 1, 2).ran(0).ran(1).ran(2)
    details = [v.detail for v in run.check(versions=by_version(o0=1, o1=3, o2=2)).violations]
    assert "owner p1 went back: it had already started version 3 (offset 1)" in details


def test_a_version_that_is_retried_is_finished_before_the_next() -> None:
    run = Run().send(A, 0, 1, 2).ran(0)
    run.ran(2, "retry").ran(1).ran(2, attempt=2)
    assert flaws(run.check(versions=by_version(o0=1, o1=3, o2=2))) == {Flaw.ORDER}
    run = Run().send(A, 0, 1, 2).ran(0).ran(2, "retry").ran(2, attempt=2).ran(1)
    assert run.check(versions=by_version(o0=1, o1=3, o2=2)).ok


def test_stale_message_is_finished_without_running() -> None:
    run = Run().send(A, 0, 1, 2).ran(0).ran(1)
    versions = by_version(o0=1, o1=2, o2=1)
    assert flaws(run.check(versions=versions)) == {Flaw.LOST, Flaw.ORDER}, "it has to be declared"
    assert run.check(versions=versions, stale={(0, 2)}).ok


def test_stale_message_that_ran_is_found() -> None:
    run = Run().send(A, 0, 1, 2).ran(0).ran(1).ran(2)
    versions = by_version(o0=1, o1=2, o2=1)
    assert flaws(run.check(versions=versions)) == {Flaw.ORDER}, "it undid what was newer"
    assert Flaw.STALE in flaws(run.check(versions=versions, stale={(0, 2)}))


def test_version_is_stale_only_after_one_as_high() -> None:
    run = Run().send(A, 0, 1, 2).ran(0).ran(1)
    verdict = run.check(versions=by_version(o0=1, o1=2, o2=3), stale={(0, 2)})
    assert flaws(verdict) == {Flaw.STALE}
    assert "version 3 was counted as stale, but no version as high is finished" in str(verdict)
    assert flaws(run.check(versions=by_version(o0=1, o1=2), stale={(0, 2)})) == {Flaw.STALE}


def test_newer_version_of_another_lane_makes_nothing_stale() -> None:
    run = Run().send(A, 0, 1).send(B, 2, 3).ran(0).ran(2).ran(3)
    versions = by_version(o0=1, o1=2, o2=1, o3=9)
    assert flaws(run.check(versions=versions, stale={(0, 1)})) == {Flaw.STALE}


def test_overlap_is_found_in_lanes_with_versions() -> None:
    run = Run().send(A, 0, 1).start(1).start(0).end(1).end(0)
    assert Flaw.OVERLAP in flaws(run.check(versions=by_version(o0=2, o1=1)))


def test_a_replay_of_versions_by_a_new_owner_is_counted() -> None:
    run = Run().send(A, 0, 1, 2).ran(0).ran(2).ran(1)
    run.ran(2, owner="p2").ran(1, owner="p2")
    versions = by_version(o0=1, o1=3, o2=2)
    assert flaws(run.check(versions=versions)) == {Flaw.REPEAT}
    assert run.check(versions=versions, allow_repeats=1).ok
    back = Run().send(A, 0, 1, 2).ran(0).ran(2).ran(1).ran(1, owner="p2").ran(2, owner="p2")
    assert flaws(back.check(versions=versions, allow_repeats=1)) == {Flaw.ORDER}


def test_messages_without_a_version_have_no_order_but_count() -> None:
    run = Run().send(A, 0, 1, 2, 3).ran(1).ran(0).ran(2)
    assert {v.flaw for v in run.check(versions=by_version(o0=1, o2=2)).violations} == {Flaw.LOST}


def test_violation_prints_no_control_characters() -> None:
    bad = "\x1b[2J\u202e\n2026-01-01 forged"
    event = HistoryEvent(
        seq=1, at=1.0, kind=EventKind.START, key=A, partition=0, offset=1, attempt=1, owner=bad, outcome=bad
    )
    shown = str(Violation(flaw=Flaw.ORDER, detail="d", key=A, event=event, timeline=(event,)))
    assert len(shown.split("\n")) == 2
    assert shown.replace("\n", "").isprintable()


# Dead letters that were redriven.


def test_redriven_letter_may_run_after_later_messages() -> None:
    run = Run().send(A, 0, 1, 2)
    run.ran(0, "dead").ran(1).ran(2).ran(0)
    assert run.check(redriven=[(0, 0)], finished=[(0, 0)]).ok
    assert Flaw.ORDER in flaws(run.check(finished=[(0, 0)]))


def test_redriven_letter_before_an_older_message_is_found() -> None:
    run = Run().send(A, 0, 1, 2)
    run.ran(1).ran(0).ran(2)
    assert Flaw.ORDER in flaws(run.check(redriven=[(0, 1)], finished=[(0, 1)]))


def test_repeat_after_a_redriven_letter_is_out_of_order() -> None:
    run = Run().send(A, 0, 1, 2)
    run.ran(0, owner="p1").ran(1, "dead", owner="p1")
    run.ran(1, owner="p2").ran(0, owner="p2").ran(2, owner="p2")
    verdict = run.check(redriven=[(0, 1)], finished=[(0, 1)], allow_repeats=1)
    assert flaws(verdict) == {Flaw.ORDER}


def test_late_result_comes_after_all_earlier_ones() -> None:
    sent = [(A, 0), (A, 1), (A, 2), (A, 3)]
    assert check_results(sent, [(A, 0), (A, 2), (A, 1), (A, 3)], late=[1]).ok
    assert flaws_of_results(sent, [(A, 0), (A, 2), (A, 1), (A, 3)]) == {Flaw.ORDER}
    assert flaws_of_results(sent, [(A, 1), (A, 0), (A, 2), (A, 3)], late=[1]) == {Flaw.ORDER}


def flaws_of_results(
    sent: list[tuple[bytes, int]], results: list[tuple[bytes, int]], late: Iterable[int] = ()
) -> set[Flaw]:
    return set(check_results(sent, results, late=list(late)).tally)
