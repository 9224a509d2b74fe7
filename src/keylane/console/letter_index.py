"""Index of an app's dead letters in a temporary database, so that they can be filtered, grouped and paged."""

from __future__ import annotations

import json
import sqlite3
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane.dlq.reader import read_dead_letters
from keylane.dlq.record import DeadLetter, DeadLetterKind, UnreadableDeadLetter
from keylane.dlq.summary import Cause, Causes
from keylane.kafka.cluster import Cluster
from keylane.key_text import show_key
from keylane.safe_text import cut, valid
from keylane.topic_names import dead_letter_topic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from keylane.dlq.record import ExpectedOrigin
    from keylane.kafka.settings import KafkaSettings
    from keylane.offsets.offset_runs import OffsetRuns

CAUSES_SHOWN = 100
PAGE_LETTERS = 100
TREND_STEPS = 24
_MESSAGE_CHARACTERS_MAX = 300
_COMMIT_LETTERS = 2000
_SCHEMA = """
CREATE TABLE cause (id INTEGER PRIMARY KEY, stage TEXT, error TEXT, message TEXT);
CREATE TABLE letter (
    place INTEGER PRIMARY KEY, partition INT, offset INT, key BLOB, source TEXT, source_partition INT,
    source_offset INT, kind TEXT, cause INT, message TEXT, attempts INT, at REAL, park INT, behind INT,
    redrives INT, size INT, redriven INT NOT NULL DEFAULT 0, identity TEXT UNIQUE
);
CREATE INDEX by_cause ON letter (cause, at);
CREATE INDEX by_key ON letter (key);
CREATE INDEX by_time ON letter (at, place);
CREATE INDEX by_position ON letter (partition, offset);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterQuery:
    """A filter; None matches all. ``error`` is a class, with or without its module."""

    key: bytes | None = None
    stage: str | None = None
    error: str | None = None
    since: float | None = None
    until: float | None = None
    kind: DeadLetterKind | None = None
    cause: int | None = None
    redriven: bool = False
    """Also those that were redriven."""

    def where(self) -> tuple[str, list[Any]]:
        """The condition in SQL, and its values."""
        parts, values = ["1"], []
        for condition, value in (
            ("letter.key = ?", self.key),
            ("cause.stage = ?", self.stage),
            ("letter.at >= ?", self.since),
            ("letter.at < ?", self.until),
            ("letter.kind = ?", None if self.kind is None else self.kind.value),
            ("letter.cause = ?", self.cause),
        ):
            if value is not None:
                parts.append(condition)
                values.append(value)
        if self.error is not None:
            parts.append("substr('.' || cause.error, -length(?)) = ?")
            values += [f".{self.error}"] * 2
        if not self.redriven:
            parts.append("letter.redriven = 0")
        return " AND ".join(parts), values


class LetterIndex:
    """The dead letters of one app. :meth:`refresh` reads what is new; the rest answers from the database.

    Thread-safe. Close it at the end: the database is a temporary file of the process.
    """

    def __init__(self, settings: KafkaSettings, app: str) -> None:
        self.app = app
        self.read, self.to_read = 0, 0
        """Dead letters that a refresh has read, and about how many there are; for progress."""
        self._settings = settings
        self._topic = dead_letter_topic(app)
        self._refreshing = threading.Lock()
        self._lock = threading.Lock()  # of the database
        self._open()

    def _open(self) -> None:
        self._database = sqlite3.connect("", check_same_thread=False)
        self._database.executescript(_SCHEMA)
        self._causes = Causes()
        self._cause_ids: dict[Cause, int] = {}
        self._next: dict[int, int] = {}
        self._unreadable: list[dict[str, Any]] = []
        self._unreadable_count = 0

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()

    @property
    def refreshing(self) -> bool:
        """Whether a refresh runs now."""
        return self._refreshing.locked()

    def refresh(self, home: ExpectedOrigin, redriven: Mapping[int, OffsetRuns]) -> None:
        """Read the dead letters that were written since the last time. Raises BrokerError.

        Does nothing while another thread refreshes.
        """
        if not self._refreshing.acquire(blocking=False):
            return
        try:
            self._refresh(home, redriven)
        finally:
            self._refreshing.release()

    def _refresh(self, home: ExpectedOrigin, redriven: Mapping[int, OffsetRuns]) -> None:
        cluster = Cluster(self._settings)
        count = cluster.topics().get(self._topic, 0)
        begins = cluster.ends(self._topic, range(count), earliest=True) if count else {}
        ends = cluster.ends(self._topic, range(count)) if count else {}
        if any(ends.get(p, 0) < at for p, at in self._next.items()):
            with self._lock:  # the topic was deleted and created again
                self._database.close()
                self._open()
        starts = {p: max(begins[p], self._next.get(p, 0)) for p in ends}
        self.read, self.to_read = 0, sum(max(0, ends[p] - starts[p]) for p in ends)
        wanted = [p for p in ends if starts[p] < ends[p]]
        rows: list[tuple[Any, ...]] = []
        if wanted:
            letters = read_dead_letters(
                self._settings, self._topic, partitions=wanted, start=starts, end=ends
            )
            for each in letters:
                self.read += 1
                self._next[each.partition] = each.offset + 1
                rows.extend(self._row(home.check(each)))
                if len(rows) >= _COMMIT_LETTERS:
                    self._store(rows)
                    rows = []
        self._store(rows)
        self._next |= ends
        with self._lock:
            for partition, begin in begins.items():  # retention
                self._database.execute(
                    "DELETE FROM letter WHERE partition = ? AND offset < ?", (partition, begin)
                )
            self._mark(redriven)
            self._database.commit()

    def _row(self, each: DeadLetter | UnreadableDeadLetter) -> Iterator[tuple[Any, ...]]:
        if isinstance(each, UnreadableDeadLetter):
            self._unreadable_count += 1
            if len(self._unreadable) < CAUSES_SHOWN:
                self._unreadable.append({"position": each.position, "reason": cut(each.reason, 500)})
            return
        cause, at = self._causes.of(each)
        number = self._cause_ids.get(cause)
        if number is None:
            number = self._cause_ids[cause] = len(self._cause_ids) + 1
            with self._lock:
                texts = [
                    None if text is None else valid(text)
                    for text in (cause.stage, cause.error, cause.message)
                ]
                self._database.execute("INSERT INTO cause VALUES (?, ?, ?, ?)", (number, *texts))
        same = (each.cluster, each.topic, each.topic_id, each.source_partition, each.source_offset)
        yield (
            each.partition,
            each.offset,
            each.key,
            each.source,
            each.source_partition,
            each.source_offset,
            each.kind.value,
            number,
            None if each.message is None else valid(cut(each.message, _MESSAGE_CHARACTERS_MAX)),
            each.attempts,
            at,
            each.park,
            each.kind is DeadLetterKind.PARKED and each.error is None,
            each.redrives,
            None if each.value is None else len(each.value),
            json.dumps([*same, each.redrives, each.kind.value]),
        )

    def _store(self, rows: list[tuple[Any, ...]]) -> None:
        with self._lock:
            self._database.executemany(
                "INSERT OR IGNORE INTO letter (partition, offset, key, source, source_partition, source_offset, kind,"
                " cause, message, attempts, at, park, behind, redrives, size, identity)"
                f" VALUES ({', '.join('?' * 16)})",
                rows,
            )
            self._database.commit()

    def _mark(self, redriven: Mapping[int, OffsetRuns]) -> None:
        """Mark those that were redriven since."""
        for partition, offsets in redriven.items():
            found = self._database.execute(
                "SELECT place, offset FROM letter WHERE partition = ? AND redriven = 0", (partition,)
            ).fetchall()
            self._database.executemany(
                "UPDATE letter SET redriven = 1 WHERE place = ?",
                [(place,) for place, offset in found if offset in offsets],
            )

    def causes(self, query: LetterQuery, now: float, trend_seconds: float = 86_400.0) -> dict[str, Any]:
        """The dead letters by cause, the most frequent first, each with its trend."""
        where, values = query.where()
        with self._lock:
            run = self._database.execute
            total, lanes = run(
                "SELECT count(*), count(DISTINCT key) FROM letter JOIN cause ON cause.id = letter.cause "
                f"WHERE {where}",
                values,
            ).fetchone()
            groups = run(
                "SELECT cause.id, cause.stage, cause.error, cause.message, count(*) AS n, count(DISTINCT key),"
                " sum(behind), min(at), max(at), sum(kind = 'parked'), sum(kind = 'archived')"
                f" FROM letter JOIN cause ON cause.id = letter.cause WHERE {where}"
                " GROUP BY cause.id ORDER BY n DESC, max(at) DESC LIMIT ?",
                [*values, CAUSES_SHOWN + 1],
            ).fetchall()
            begin, width = now - trend_seconds, trend_seconds / TREND_STEPS
            trends: dict[int, list[int]] = {group[0]: [0] * TREND_STEPS for group in groups}
            for cause, step, number in run(
                f"SELECT letter.cause, CAST((at - ?) / ? AS INT) AS step, count(*) FROM letter JOIN cause"
                f" ON cause.id = letter.cause WHERE {where} AND at >= ? GROUP BY letter.cause, step",
                [begin, width, *values, begin],
            ):
                if cause in trends and 0 <= step < TREND_STEPS:
                    trends[cause][step] = number
            redriven = run("SELECT count(*) FROM letter WHERE redriven = 1").fetchone()[0]
            stages = [
                row[0] for row in run("SELECT DISTINCT stage FROM cause WHERE stage NOT NULL LIMIT 200")
            ]
            errors = [
                row[0] for row in run("SELECT DISTINCT error FROM cause WHERE error NOT NULL LIMIT 200")
            ]
        return {
            "letters": total,
            "lanes": lanes,
            "redriven": redriven,
            "causes": [
                {
                    "id": cause,
                    "stage": stage,
                    "error": error,
                    "message": message,
                    "count": number,
                    "lanes": keys,
                    "behind": behind,
                    "first": first,
                    "last": last,
                    "parked": parked,
                    "archived": archived,
                    "trend": trends[cause],
                }
                for cause, stage, error, message, number, keys, behind, first, last, parked, archived in groups[
                    :CAUSES_SHOWN
                ]
            ],
            "more_causes": len(groups) > CAUSES_SHOWN,
            "stages": sorted(stages),
            "errors": sorted(errors),
            "unreadable": self._unreadable_count,
            "unreadable_examples": self._unreadable[:20],
            **self.progress(),
        }

    def page(self, query: LetterQuery, page: int) -> dict[str, Any]:
        """One page of dead letters, the newest first."""
        where, values = query.where()
        with self._lock:
            rows = self._database.execute(
                "SELECT letter.partition, letter.offset, key, source, kind, cause.id, cause.stage, cause.error,"
                " letter.message, attempts, at, behind, redrives, size, redriven"
                f" FROM letter JOIN cause ON cause.id = letter.cause WHERE {where}"
                " ORDER BY at DESC, place DESC LIMIT ? OFFSET ?",
                [*values, PAGE_LETTERS + 1, page * PAGE_LETTERS],
            ).fetchall()
        names = (
            "partition", "offset", "key", "source", "kind", "cause", "stage", "error", "message", "attempts", "at",
            "behind", "redrives", "size", "redriven",
        )  # fmt: skip
        letters = [dict(zip(names, row, strict=True)) for row in rows[:PAGE_LETTERS]]
        for letter in letters:
            key = letter["key"]
            letter["key"] = None if key is None else cut(show_key(key), 1000)
        return {
            "letters": letters,
            "page": page,
            "more": len(rows) > PAGE_LETTERS,
            **self.progress(),
        }

    def cause(self, number: int) -> Cause | None:
        """The cause with this id."""
        return next((cause for cause, known in self._cause_ids.items() if known == number), None)

    def progress(self) -> dict[str, Any]:
        """How far a refresh is."""
        return {"refreshing": self.refreshing, "read": self.read, "to_read": self.to_read}
