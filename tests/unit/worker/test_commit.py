from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Ledger, Message, Outcome
from keylane.errors import AbortedError
from keylane.kafka.rejection import Rejections
from keylane.lanes.lane_record import RetryState
from keylane.offsets.slots import ALL
from keylane.testing import MemoryRecord
from keylane.worker.attempt_records import AttemptRecords
from keylane.worker.commit import CommitBatch, Contributor, commit
from keylane.worker.ledger_writer import LedgerWriter
from keylane.worker.uncommitted import UncommittedDeliveries

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from keylane.kafka.transactional_writer import StateRecord
    from keylane.worker.commit import TopicRecord


class Writer:
    """Commits, but for the first ``aborts`` times. During a commit ``meanwhile`` happens."""

    room = 1000

    def __init__(self, aborts: int = 0) -> None:
        self.aborts = aborts
        self.committed: list[object] = []
        self.meanwhile: Any = lambda: None
        self.turns = 0
        self.hangs = False
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        async with self._lock:
            self.turns += 1
            yield

    async def commit_with(
        self, offsets: Sequence[Any], state_records: Sequence[StateRecord], records: Sequence[TopicRecord]
    ) -> None:
        await asyncio.sleep(3600 if self.hangs else 0)
        self.meanwhile()
        if self.aborts:
            self.aborts -= 1
            raise AbortedError("lost on purpose")
        self.committed += [*offsets, *state_records, *records]


class Counted(Contributor):
    """Adds what it was given, each thing once."""

    def __init__(self, name: str, calls: list[str], fails: Iterable[str] = ()) -> None:
        self.name, self.calls, self.fails = name, calls, fails
        self.waiting: list[bytes] = []
        self.collected: list[bytes] = []

    def collect(self, batch: CommitBatch, /) -> None:
        self._heard("collect")
        self.collected, self.waiting = self.waiting, []
        for value in self.collected:
            batch.note(0, self.name.encode(), value)
        self._fail("collect")

    def committed(self) -> None:
        self._heard("committed")
        self.collected = []
        self._fail("committed")

    def aborted(self) -> None:
        self._heard("aborted")
        self.waiting[:0] = self.collected
        self.collected = []
        self._fail("aborted")

    def _heard(self, what: str) -> None:
        self.calls.append(f"{what} {self.name}")

    def _fail(self, what: str) -> None:
        if what in self.fails:
            raise RuntimeError(f"{what} {self.name}")


def test_contributors_are_called_in_their_order() -> None:
    calls: list[str] = []
    asyncio.run(commit(Writer(), [Counted(name, calls) for name in "abc"]))
    assert calls == [f"{what} {name}" for what in ("collect", "committed") for name in "abc"]


def test_aborted_contributors_are_called_in_their_order() -> None:
    calls: list[str] = []
    with pytest.raises(AbortedError):
        asyncio.run(commit(Writer(aborts=1), [Counted(name, calls) for name in "abc"]))
    assert calls == [f"{what} {name}" for what in ("collect", "aborted") for name in "abc"]


@pytest.mark.parametrize("aborts", [0, 1, 3])
def test_every_contribution_is_committed_exactly_once(aborts: int) -> None:
    writer, calls = Writer(aborts), list[str]()
    contributors = [Counted(name, calls) for name in "ab"]
    count = iter(range(1000))

    def meanwhile() -> None:
        contributors[0].waiting.append(b"%d" % next(count))

    writer.meanwhile = meanwhile
    contributors[1].waiting.append(b"first")

    async def main() -> None:
        for _ in range(aborts):
            with pytest.raises(AbortedError):
                await commit(writer, contributors)
        await commit(writer, contributors)
        await commit(writer, contributors)

    asyncio.run(main())
    added = [(0, b"a", b"%d" % n) for n in range(aborts + 1)]
    assert sorted(map(str, writer.committed)) == sorted(map(str, [(0, b"b", b"first"), *added]))


def test_a_failing_collect_writes_nothing_and_loses_nothing() -> None:
    writer, calls = Writer(), list[str]()
    first, second, third = (Counted(name, calls, ["collect"] if name == "b" else []) for name in "abc")
    first.waiting, second.waiting = [b"1"], [b"2"]
    with pytest.raises(RuntimeError, match="collect b"):
        asyncio.run(commit(writer, [first, second, third]))
    assert calls == ["collect a", "collect b", "aborted a", "aborted b"]
    assert writer.committed == []
    assert (first.waiting, second.waiting) == ([b"1"], [b"2"])


@pytest.mark.parametrize("what", ["committed", "aborted"])
def test_a_failing_contributor_does_not_silence_others(what: str) -> None:
    calls: list[str] = []
    contributors = [Counted(name, calls, [what] if name == "b" else []) for name in "abc"]
    with pytest.raises(RuntimeError, match=f"{what} b"):
        asyncio.run(commit(Writer(aborts=what == "aborted"), contributors))
    assert calls[3:] == [f"{what} {name}" for name in "abc"]


def test_a_cancelled_commit_says_neither() -> None:
    """The loop ends: its thread still commits, and the result stays unknown."""
    writer, calls = Writer(), list[str]()
    writer.hangs = True

    async def main() -> None:
        running = asyncio.ensure_future(commit(writer, [Counted("a", calls)]))
        await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert calls == ["collect a"]


def test_two_commits_at_a_time_take_turns() -> None:
    writer, calls = Writer(), list[str]()
    contributor = Counted("a", calls)

    async def main() -> None:
        await asyncio.gather(commit(writer, [contributor]), commit(writer, [contributor]))

    asyncio.run(main())
    assert calls == ["collect a", "committed a"] * 2


def test_uncommitted_deliveries_count_once_after_an_abort() -> None:
    counted: list[Any] = []
    uncommitted = UncommittedDeliveries(counted.extend)
    deliveries: list[Any] = ["first", "second", "third"]
    uncommitted.add(deliveries[:1])
    uncommitted.collect(CommitBatch(room=0))
    uncommitted.add(deliveries[1:2])
    uncommitted.aborted()
    uncommitted.collect(CommitBatch(room=0))
    assert counted == []
    uncommitted.add(deliveries[2:])
    uncommitted.committed()
    assert counted == ["first", "second"], "what was done behind it is in the next transaction"
    uncommitted.collect(CommitBatch(room=0))
    uncommitted.committed()
    assert counted == deliveries


def test_attempts_are_collected_until_they_are_committed() -> None:
    state = RetryState(stage="a", attempt=2, attempts=1, since=1.0, due=2.0)
    current = {0: {7: state}}
    records = AttemptRecords({0: ALL}, {}, lambda: current)

    def collect() -> int:
        batch = CommitBatch(room=1000)
        records.collect(batch)
        return len(batch.notes)

    assert collect() == 1
    records.aborted()
    assert collect() == 1
    records.committed()
    assert collect() == 0
    current.clear()
    assert collect() == 1, "an empty record takes the old one back"
    records.committed()
    assert collect() == 0


def test_a_retried_commit_has_ledger_and_failures_once() -> None:
    ledger = LedgerWriter(App("a", source="in", ledger=Ledger()).spec, Ledger(), "host:1/0")
    delivery: Any = Message(MemoryRecord(topic="in", partition=0, offset=1, key=b"k", value=b""))
    rejections = Rejections()
    rejections.set_reason((0, 1), "too large")
    assert rejections.reason(0, 1) == "too large"
    ledger.started(delivery, 1)
    ledger.ended(delivery, 1, Outcome.DEAD)
    writer = Writer(aborts=1)
    with pytest.raises(AbortedError):
        asyncio.run(commit(writer, [ledger, rejections]))
    assert rejections.reasons
    for _ in range(2):
        asyncio.run(commit(writer, [ledger, rejections]))
    assert len(writer.committed) == 1
    assert not rejections.reasons
