"""The campaign's judge must find what is broken: each promise is broken once here, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

import pytest

from campaign.judge import EXACTLY_ONCE, Evidence, judge
from campaign.watch import Sample
from keylane.offsets.offset_set import OffsetSet, blocks_of
from keylane.offsets.watermark import PartitionProgress
from keylane.state.topic import RANGES
from keylane.testing import EventKind, History, HistoryEvent

if TYPE_CHECKING:
    from campaign.finding import Ruling

MS = 1_000_000
COUNT = 40
KEYS = (b"a", b"b")


def attempt(
    offset: int, begin: int, end: int, *, owner: str = "one", outcome: str = "ok"
) -> list[HistoryEvent]:
    """Messages of key a are the even ones, of key b the odd ones; all in partition 0. Moments in milliseconds."""
    key = KEYS[offset % 2]
    return [
        HistoryEvent(EventKind.START, key, 0, offset, 1, owner, 0.0, begin * MS),
        HistoryEvent(EventKind.END, key, 0, offset, 1, owner, 0.0, end * MS, outcome),
    ]


def history(*events: list[HistoryEvent]) -> History:
    return History(events=tuple(sorted(chain(*events), key=attrgetter("seq"))))


def sample(at: int, watermark: int, position: int | None = None, pending: tuple[int, ...] = ()) -> Sample:
    progress = PartitionProgress(
        watermark=watermark,
        position=watermark if position is None else position,
        pending=OffsetSet(blocks_of(sorted(pending))),
    )
    return Sample(at=at * MS, progress={0: progress}, raw={0: ""})


def whole(**changed: object) -> Evidence:
    """A run without a flaw: one message after another, each 10 ms, message 7 is poison; committed every 100 ms."""
    evidence = Evidence(
        delivery=EXACTLY_ONCE,
        sent={(0, offset): (KEYS[offset % 2], offset) for offset in range(COUNT)},
        poison=frozenset({7}),
        history=history(
            *(attempt(n, n * 10, n * 10 + 9, outcome="dead" if n == 7 else "ok") for n in range(COUNT))
        ),
        samples=[sample(at, at // 10) for at in range(0, COUNT * 10 + 1, 100)],
        results=[(KEYS[n % 2], n) for n in range(COUNT) if n != 7],
        letters=[(0, 7)],
        peaceful=True,
    )
    return replace(evidence, **changed)  # type: ignore[arg-type]


def crashed(**changed: object) -> Evidence:
    """Owner one is killed at 250 ms, with 20 committed; owner two begins at 400 ms with the rest."""
    events = [attempt(n, n * 10, n * 10 + 9, outcome="dead" if n == 7 else "ok") for n in range(25)]
    events += [attempt(n, n * 10 + 200, n * 10 + 209, owner="two") for n in range(20, COUNT)]
    evidence = whole(
        delivery="at_least_once",
        peaceful=False,
        history=history(*events),
        samples=[sample(100, 10), sample(200, 20), sample(500, 30), sample(620, 40)],
        results=[(KEYS[n % 2], n) for n in [*range(7), *range(8, 25), *range(20, COUNT)]],
    )
    return replace(evidence, **changed)  # type: ignore[arg-type]


def rules(ruling: Ruling) -> set[str]:
    return set(ruling.rules)


@pytest.mark.parametrize("evidence", [whole(), whole(delivery="at_least_once"), crashed()])
def test_a_run_without_a_flaw_is_ok(evidence: Evidence) -> None:
    ruling = judge(evidence)
    assert ruling.ok, ruling.findings


def test_an_overlap_in_the_history_is_found() -> None:
    events = [attempt(n, n * 10, n * 10 + (25 if n == 20 else 9)) for n in range(COUNT)]
    assert "overlap" in rules(judge(whole(history=history(*events))))


def test_a_message_that_never_ran_is_found() -> None:
    events = [attempt(n, n * 10, n * 10 + 9) for n in range(COUNT) if n != 39]
    found = rules(judge(whole(history=history(*events), results=whole().results[:-1])))
    assert {"lost", "sink lost", "commit ahead"} <= found


def test_a_duplicate_in_an_exactly_once_sink_is_found() -> None:
    again = [*whole().results, (b"a", 38)]
    assert "sink repeat" in rules(judge(whole(results=again)))
    # Not even at_least_once may have a result that no task computed.
    assert rules(judge(whole(results=again, delivery="at_least_once"))) == {"sink invented"}
    # But a client may have sent it again when a broker died.
    assert judge(whole(results=again, delivery="at_least_once", outages=[(0, MS)])).ok


def test_open_transaction_is_found() -> None:
    assert judge(whole(left_open=0.5)).ok
    assert rules(judge(whole(left_open=58.0))) == {"left open"}


def test_duplicate_after_outside_deletion_is_excused() -> None:
    """Without them it is not known what was done."""
    evidence = replace(crashed(), delivery=EXACTLY_ONCE)
    assert rules(judge(evidence)) == {"sink repeat"}
    assert judge(replace(evidence, forgotten=[350 * MS])).ok


def test_results_out_of_order_are_found() -> None:
    results = list(whole().results)
    results[10], results[12] = results[12], results[10]
    assert rules(judge(whole(results=results))) == {"sink order"}


def test_progress_that_moved_back_is_found() -> None:
    back = [*whole().samples, sample(450, 35), sample(500, 40)]
    assert {"progress moved back", "progress forgot"} <= rules(judge(whole(samples=back)))
    assert judge(whole(samples=back, forgotten=[420 * MS])).ok
    none = [*whole().samples, Sample(at=450 * MS, progress={}, raw={})]
    assert "progress moved back" in rules(judge(whole(samples=none)))


def test_progress_that_forgot_done_offsets_is_found() -> None:
    samples = [sample(305, 10, 30, (10,)), sample(310, 10, 30, (10, 20))]
    assert rules(judge(whole(samples=samples))) == {"progress forgot"}


def test_shared_partition_keeps_done_offsets_elsewhere() -> None:
    before = sample(305, 10, 30, (10,))
    shared = replace(sample(310, 10), raw={0: RANGES})
    assert judge(whole(samples=[before, shared, sample(315, 10, 30, (10,))])).ok
    assert rules(judge(whole(samples=[before, shared, sample(315, 10, 30, (10, 20))]))) == {"progress forgot"}
    back = replace(shared, progress=sample(0, 9).progress)
    assert rules(judge(whole(samples=[before, back]))) == {"progress moved back"}


def test_commit_ahead_of_done_messages_is_found() -> None:
    assert rules(judge(whole(samples=[sample(200, 25)]))) == {"commit ahead"}
    assert rules(judge(whole(samples=[sample(200, 10, 25, (10, 12))]))) == {"commit ahead"}


def test_repeat_of_a_committed_message_is_found() -> None:
    assert rules(judge(crashed(samples=[sample(240, 22), sample(620, 40)]))) == {"repeat of committed"}


def test_a_repeat_without_a_crash_is_found() -> None:
    assert "repeat without a crash" in rules(judge(replace(crashed(), peaceful=True)))


def test_a_repeat_that_should_long_have_been_committed_is_found() -> None:
    """The owner lives for five seconds after it has finished the first messages; then all runs again."""
    events = [attempt(n, n * 10, n * 10 + 9) for n in range(20)]
    events += [attempt(n, n * 10 + 5000, n * 10 + 5009) for n in range(20, 25)]
    events += [attempt(n, n * 10 + 6000, n * 10 + 6009, owner="two") for n in range(COUNT)]
    evidence = whole(
        peaceful=False,
        delivery="at_least_once",
        history=history(*events),
        samples=[sample(9000, COUNT)],
        poison=frozenset(),
        letters=[],
        results=[(KEYS[n % 2], n) for n in range(COUNT)],
    )
    assert rules(judge(evidence)) == {"repeat too old"}
    assert judge(replace(evidence, outages=[(0, 5_100 * MS)])).ok
    # It was stopped, and went on after five seconds: it could not have committed.
    assert judge(replace(evidence, zombies={"one": 205 * MS})).ok
    # A process runs on for a moment after the signal.
    assert judge(replace(evidence, zombies={"one": 198 * MS})).ok
    assert rules(judge(replace(evidence, zombies={"one": 50 * MS}))) == {"repeat too old"}


def test_dead_letters_that_are_missing_or_too_many_are_found() -> None:
    assert rules(judge(whole(letters=[]))) == {"letter lost"}
    assert rules(judge(whole(letters=[(0, 7), (0, 7)]))) == {"letter repeated"}
    assert rules(judge(whole(letters=[(0, 7), (0, 8)]))) == {"letter too many"}
    assert rules(judge(whole(letters=[(0, 7), (9, 9)]))) == {"letter unknown"}


def test_unfinished_messages_are_found() -> None:
    assert rules(judge(whole(caught_up=False))) == {"stuck"}


def zombie(**changed: object) -> Evidence:
    """Owner one stops at 250 ms in the middle of message 25, owner two begins at 400 ms, one continues at 500 ms."""
    evidence = crashed()
    late = attempt(25, 248, 505) + attempt(26, 506, 510) + attempt(27, 511, 515)
    evidence = crashed(history=history(list(evidence.history.events), late), zombies={"one": 250 * MS})
    return replace(evidence, **changed)  # type: ignore[arg-type]


def test_only_fenced_zombie_events_are_left_out() -> None:
    ruling = judge(zombie())
    assert ruling.ok, ruling.findings
    assert ruling.facts["by zombies"] == 5
    # The same without the knowledge that it was a zombie: an overlap.
    assert "overlap" in rules(judge(replace(zombie(), zombies={})))
    # An overlap before the fence is not excused.
    early = replace(
        zombie(), history=history(list(zombie().history.events), attempt(24, 243, 247, owner="x"))
    )
    assert "overlap" in rules(judge(early))


def test_sharing_task_does_not_fence_a_zombie() -> None:
    """It finishes its message, records it and releases its slots before another task takes them."""
    events = [attempt(n, n * 10, n * 10 + 9, owner="other") for n in range(1, COUNT, 2) if n != 7]
    events += [attempt(7, 70, 79, owner="other", outcome="dead")]
    events += [attempt(n, n * 10, n * 10 + 9) for n in range(0, 26, 2)]
    events += [attempt(26, 260, 300)]  # stopped in the middle
    events += [attempt(n, 310 + (n - 28) * 10, 319 + (n - 28) * 10, owner="two") for n in range(28, COUNT, 2)]
    shared = whole(
        history=history(*events),
        samples=[sample(0, 0), sample(100, 10), sample(200, 20), sample(305, 28), sample(440, 40)],
        zombies={"one": 265 * MS},
    )
    ruling = judge(shared)
    assert ruling.ok, ruling.findings
    late = attempt(28, 325, 335)  # and this it does after its slots were taken
    assert judge(replace(shared, history=history(*events, late))).facts["by zombies"] == 2


def test_a_zombie_that_moves_progress_is_found() -> None:
    back = [sample(100, 10), sample(200, 20), sample(500, 30), sample(520, 25), sample(620, 40)]
    assert "progress moved back" in rules(judge(zombie(samples=back)))
    # Progress that rests on what only the zombie did.
    ahead = [sample(100, 10), sample(530, 20, 40, (20, *range(28, 34), 35, 36, 37, 38, 39))]
    events = [event for event in zombie().history if not (event.owner == "two" and event.offset > 26)]
    assert "commit ahead" in rules(judge(zombie(samples=ahead, history=History(events=tuple(events)))))


def test_zombie_without_a_replacement_proves_nothing() -> None:
    assert rules(judge(whole(zombies={"one": 399 * MS}))) == {"thin"}
    # One that was stopped before it had begun anything, and never did, is none.
    assert judge(whole(zombies={"other": 399 * MS})).ok
