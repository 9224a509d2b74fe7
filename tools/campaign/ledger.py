"""The commit rule, checked from outside: what progress said at a moment, against what the history shows by then."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

from campaign.finding import Finding
from keylane.state.topic import RANGES
from keylane.testing import EventKind
from keylane.testing.history import FINAL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from campaign.watch import Position, Sample
    from keylane.testing import History, HistoryEvent

_VIOLATIONS_SHOWN = 5
_STOP_NS = 100_000_000
"""A process may run for so long after it was told to stop: on a busy machine, and with many threads."""


class Repeat(NamedTuple):
    """A message that was finished, and started again by another owner."""

    start: HistoryEvent
    finished: HistoryEvent
    """Its first final end."""


class Ledger:
    """The facts about progress: when each message finished first, what started after that, and each commit.

    ``forgotten`` are the moments at which progress was deleted from outside; messages done before may run again.
    """

    def __init__(
        self,
        history: History,
        sent: Mapping[Position, tuple[bytes, int]],
        samples: Sequence[Sample],
        forgotten: Sequence[int],
    ) -> None:
        self._sent = sent
        self._samples = samples
        self._forgotten = forgotten
        self._finished: dict[Position, HistoryEvent] = {}
        self._last: dict[str, int] = {}
        repeats: dict[tuple[Position, str], Repeat] = {}
        for event in history:
            position = (event.partition, event.offset)
            self._last[event.owner] = event.seq
            if event.kind is EventKind.END:
                if event.outcome in FINAL:
                    self._finished.setdefault(position, event)
            elif position in self._finished:
                repeats.setdefault((position, event.owner), Repeat(event, self._finished[position]))
        self.repeats = list(repeats.values())
        offsets: dict[int, list[int]] = {}
        for partition, offset in sorted(sent):
            offsets.setdefault(partition, []).append(offset)
        self._done = [_done(sample, offsets) for sample in samples]  # beside each sample

    def commits_ahead(self) -> list[Finding]:
        """Progress never says done before the history does."""
        findings: list[Finding] = []
        known: set[Position] = set()
        for sample, done in zip(self._samples, self._done, strict=True):
            for position in sorted(done - known):
                finished = self._finished.get(position)
                if finished is None or finished.seq > sample.at:
                    when = "never" if finished is None else f"{(finished.seq - sample.at) / 1e9:.3f} s later"
                    detail = f"progress says that {_name(position)} is done; it was finished {when}"
                    findings.append(self._finding("commit ahead", detail, position, sample.at))
            known |= done
        return findings[:_VIOLATIONS_SHOWN]

    def going_back(self) -> list[Finding]:
        """The committed offset never moves back, and nothing that was done is pending again."""
        findings: list[Finding] = []
        highest: dict[int, int] = {}
        known: set[Position] = set()
        before = 0
        for sample, said in zip(self._samples, self._done, strict=True):
            if self._forgot(before, sample.at):
                highest, known = {}, set()
            before = sample.at
            # For a shared partition the group has the progress common to all; the rest is in the state topic.
            shared = {partition for partition, text in sample.raw.items() if text.split(" ")[0] == RANGES}
            done = said | {position for position in known if position[0] in shared}
            marks = {partition: progress.watermark for partition, progress in sample.progress.items()}
            for partition, mark in sorted(highest.items()):
                if (now := marks.get(partition)) is None or now < mark:
                    detail = f"the offset of partition {partition} went from {mark} to {now}"
                    findings.append(Finding(rule="progress moved back", detail=detail, at=sample.at))
            if lost := sorted(known - done):
                detail = f"{len(lost)} messages were done and are not any more, the first is {_name(lost[0])}"
                findings.append(self._finding("progress forgot", detail, lost[0], sample.at))
            highest, known = marks, done
        return findings[: _VIOLATIONS_SHOWN * 2]

    def repeats_of_committed(self) -> list[Finding]:
        """What progress said is done does not start again."""
        first: dict[Position, int] = {}
        for sample, done in zip(self._samples, self._done, strict=True):
            for position in done:
                first.setdefault(position, sample.at)
        findings = []
        for start, _ in self.repeats:
            position = (start.partition, start.offset)
            said = first.get(position)
            if said is None or said > start.seq or self._forgot(said, start.seq):
                continue
            ago = (start.seq - said) / 1e9
            detail = f"{_name(position)} was done in progress {ago:.3f} s before {start.owner} ran it again"
            findings.append(self._finding("repeat of committed", detail, position, start.seq))
        return findings[:_VIOLATIONS_SHOWN]

    def needless_repeats(self, *, peaceful: bool) -> list[Finding]:
        """Nothing runs again in the hands of the owner that finished it, or when nothing was killed."""
        findings = []
        for start, finished in self.repeats:
            if peaceful or start.owner == finished.owner:
                position = (start.partition, start.offset)
                detail = f"{_name(position)} was finished by {finished.owner} and run again by {start.owner}"
                findings.append(self._finding("repeat without a crash", detail, position, start.seq))
        return findings[:_VIOLATIONS_SHOWN]

    def late_commits(
        self, outages: Sequence[tuple[int, int]], stopped: Mapping[str, int], seconds: float
    ) -> list[Finding]:
        """What runs again was in flight or done since the last commit: not long before its owner's end or stop."""
        findings = []
        for start, finished in self.repeats:
            ended = min(self._last[finished.owner], start.seq)
            stop = stopped.get(finished.owner)
            if stop is not None and finished.seq < stop + _STOP_NS:
                ended = min(ended, stop + _STOP_NS)
            if ended - finished.seq <= seconds * 1e9 or self._forgot(finished.seq, start.seq):
                continue
            if any(began <= ended and finished.seq <= over for began, over in outages):
                continue
            position = (start.partition, start.offset)
            age = (ended - finished.seq) / 1e9
            detail = (
                f"{_name(position)} ran again, finished {age:.1f} s before its owner {finished.owner} ended: "
                f"progress should have been committed within {seconds:g} s"
            )
            findings.append(self._finding("repeat too old", detail, position, start.seq))
        return findings[:_VIOLATIONS_SHOWN]

    def _forgot(self, since: int, until: int) -> bool:
        return any(since <= moment <= until for moment in self._forgotten)

    def _finding(self, rule: str, detail: str, position: Position, at: int) -> Finding:
        key = self._sent[position][0]
        return Finding(rule=rule, detail=f"{detail} (key {key!r})", key=key, at=at)


def _done(sample: Sample, offsets: Mapping[int, Sequence[int]]) -> set[Position]:
    """Of the messages that were sent, those that this sample says are done."""
    done: set[Position] = set()
    for partition, progress in sample.progress.items():
        mine = offsets.get(partition, ())
        below = bisect_left(mine, progress.watermark)
        reached = bisect_left(mine, progress.position)
        done.update((partition, offset) for offset in mine[:below])
        done.update((partition, offset) for offset in mine[below:reached] if progress.is_done(offset))
    return done


def _name(position: Position) -> str:
    return f"message {position[0]}/{position[1]}"
