"""The audit: Spark SQL over a ledger, which proves of a stretch of history what the app promises, or shows where not.

One shuffle, by the key, serves every question about lanes; nothing is collected but counterexamples. The rules are
those of :mod:`keylane.testing.checker`, which judges the same in memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark import StorageLevel
from pyspark.sql import functions as f

from keylane.audit.violation import EventKind, Flaw, HistoryEvent, Violation
from keylane.errors import SettingsError
from keylane.ledger import FINAL, SLOT_SQL, Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pyspark.sql import DataFrame, SparkSession

DDL = "t STRING, p INT, o BIGINT, a INT, w STRING, l STRING, s BIGINT, e BIGINT, r STRING, d INT, m DOUBLE"
"""A record's value, as JSON."""
_KEPT = 3
"""Counterexamples shown of each kind."""
_COUNTED = 1_000
_BROADCAST = 100_000
"""Rows that go to every task instead of a shuffle of the ledger."""
_BUCKET = 10_000
_NEVER = (1 << 63) - 1
_READABLE = """
coalesce(partition >= 0 AND offset >= 0 AND attempt >= 0 AND started BETWEEN 0 AND 253402300800000000
    AND ended BETWEEN 0 AND 253402300800000000 AND share > 0 AND share <= 1
    AND life IS NOT NULL AND owner IS NOT NULL AND outcome IS NOT NULL, false)
"""
"""Of a record that is one: whoever can write into the topic can write anything. Times are before the year 10,000."""

_TIMES = """
SELECT key, partition, offset, attempt, owner, life, started, ended, redriven,
       max(ended) OVER (PARTITION BY key ORDER BY started, ended, offset
                        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS busy_until,
       lag(struct(partition, offset, attempt, life, started, redriven))
           OVER (PARTITION BY key ORDER BY started, ended, offset) AS last
FROM {ledger} WHERE key IS NOT NULL AND attempt > 0
"""
_OVERLAPS = """
started < busy_until - :skew AND NOT (last.partition = partition AND last.offset = offset
    AND last.attempt = attempt AND last.life = life AND last.started = started)
"""
"""A record that came twice is no overlap."""
_BACK = """
coalesce(last.life = life AND last.partition = partition AND offset < last.offset
    AND NOT redriven AND NOT last.redriven, false)
"""
_MESSAGES = """
SELECT key, partition, offset,
       min(CASE WHEN attempt > 0 AND NOT redriven THEN started END) AS started,
       min(CASE WHEN final THEN ended END) AS finished,
       count_if(final) AS finals,
       max(attempt) AS most_attempts,
       min(owner) AS owner_a, max(owner) AS owner_b
FROM {ledger} GROUP BY key, partition, offset
"""
_SUSPECTS = """
SELECT DISTINCT key, partition FROM (
    SELECT key, partition, started, max(coalesce(finished, 9223372036854775807)) OVER (
               PARTITION BY key, partition ORDER BY offset ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS busy
    FROM {messages} WHERE key IS NOT NULL
) WHERE started < busy - :skew
"""
"""Lanes out of order: the cheap half of the question, asked of all."""
_ORDER = """
SELECT * FROM (
    SELECT key, partition, offset, started,
           max(coalesce(finished, 9223372036854775807)) OVER lane AS waits_until,
           max_by(offset, coalesce(finished, 9223372036854775807)) OVER lane AS waits_for
    FROM {messages} WHERE key IS NOT NULL
    WINDOW lane AS (PARTITION BY key, partition ORDER BY offset ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
) WHERE started < waits_until - :skew
"""
_WHOLE = """
SELECT sum(n) AS messages, sum(unfinished) AS unfinished, sum(retried) AS retried,
       count_if(key IS NOT NULL) AS keys, count_if(key IS NOT NULL AND a = b) AS one_owner
FROM (SELECT key, count(*) AS n, count_if(finished IS NULL) AS unfinished, count_if(most_attempts > 1) AS retried,
             min(owner_a) AS a, max(owner_b) AS b
      FROM {messages} GROUP BY key)
"""
_AROUND = """
SELECT * FROM (
    SELECT v.id, l.*, row_number() OVER (
               PARTITION BY v.id ORDER BY l.partition <> v.partition, abs(l.offset - v.offset), l.started) AS place
    FROM (SELECT DISTINCT * FROM {ledger} WHERE attempt > 0) l JOIN {found} v
        ON l.key = v.key OR (v.key IS NULL AND l.partition = v.partition AND l.offset = v.offset)
) WHERE place <= 12
"""
_AGAIN = """
SELECT key, partition, offset, ended, CASE
           WHEN redriven THEN 'redriven'
           WHEN life = lag(life) OVER again THEN 'same task'
           WHEN owner = lag(owner) OVER again THEN 'began again'
           ELSE 'other task' END AS why,
       lag(ended) OVER again AS before
FROM (SELECT DISTINCT l.* FROM {ledger} l JOIN {several} m
          ON l.partition = m.partition AND l.offset = m.offset AND l.key <=> m.key
      WHERE l.final)
WINDOW again AS (PARTITION BY partition, offset, key ORDER BY ended, started)
"""
WHY = {
    "redriven": "redriven from the dead letters",
    "began again": "the same task began again: a transaction was not taken, or an epoch not committed",
    "other task": "another task went on from the last commit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What a ledger shows."""

    attempts: int
    messages: int
    keys: int
    owners: int
    retried: int
    """Messages with an attempt after the first."""
    unfinished: int
    """Begun, and not finished by the end of the ledger."""
    checked: int
    """Messages of the source that had to be finished; 0 when the source was not looked at."""
    gone: int
    """Finished, and no longer in the source: its retention is over."""
    repeats: Mapping[str, int]
    """Times that a message finished again, by the reason."""
    affinity: float
    """The share of the keys that had exactly one owner."""
    share: float
    """Of the keys that are recorded."""
    tally: Mapping[Flaw, int]
    """How many violations of each kind there are in all."""
    violations: tuple[Violation, ...] = field(default=())
    """The first of each kind, with their timelines."""
    unreadable: int = 0
    """Records of the ledger's topic that are none, and were left out."""

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.tally


def read_ledger(topic: DataFrame) -> DataFrame:
    """The attempts in a ledger's topic, as ``keylane.topic`` has it."""
    return topic.select("key", f.from_json(f.col("value").cast("string"), DDL).alias("v")).selectExpr(
        "key", "v.p AS partition", "v.o AS offset", "v.a AS attempt", "v.w AS owner", "v.l AS life",
        "v.s AS started", "v.e AS ended", "v.r AS outcome", "coalesce(v.d, 0) = 1 AS redriven",
        "coalesce(v.m, 1.0D) AS share", "v.t AS topic",
    )  # fmt: skip


def audit(
    spark: SparkSession,
    ledger: DataFrame,
    *,
    source: DataFrame | None = None,
    until: Mapping[int, int] | None = None,
    committed: DataFrame | None = None,
    stretch: bool = False,
    skew: float = 0.0,
) -> Audit:
    """Judge a ledger.

    ``ledger`` has every attempt there is a record of, ``committed`` those of committed transactions (the same, if not
    given). ``source`` are the messages (``key``, ``partition``, ``offset``), which have to be finished below the
    offsets ``until``; without them losses are not looked for. ``stretch``: the source has what came since some time,
    and all of it has to be there; else it is looked at from where the ledger begins. ``skew`` are seconds by which
    clocks of owners may differ.
    Records that cannot be read are counted and left out; what they would have proved is missing then.
    Raises :class:`SettingsError` when the ledger has no record that can be read.
    """
    work = _Work(spark, ledger, skew)
    try:
        return work.judge(source, until or {}, committed, stretch=stretch)
    finally:
        work.close()


class _Work:
    """One audit: its views, and what it has found."""

    def __init__(self, spark: SparkSession, ledger: DataFrame, skew: float) -> None:
        self._spark = spark
        self._skew = round(skew * 1e6)
        count = int(spark.conf.get("spark.sql.shuffle.partitions") or 8)
        # By key, once: every window and group below begins with it. On disk: a ledger may be larger than memory.
        self._ledger = _judged(ledger).repartition(min(count, 64), "key").persist(StorageLevel.DISK_ONLY)
        self._tally: dict[Flaw, int] = {}
        self._found: list[tuple[Flaw, Any, str]] = []
        self._persisted: list[DataFrame] = [self._ledger]

    def close(self) -> None:
        for frame in self._persisted:
            frame.unpersist()

    def judge(
        self,
        source: DataFrame | None,
        until: Mapping[int, int],
        committed: DataFrame | None,
        *,
        stretch: bool,
    ) -> Audit:
        facts = self._ledger.selectExpr(
            "count(*) AS n", "count_if(readable) AS good", "count_if(readable AND attempt > 0) AS attempts",
            "min(share) FILTER (WHERE readable) AS share", "max(share) FILTER (WHERE readable) AS most",
            "approx_count_distinct(owner, 0.01) FILTER (WHERE readable) AS owners",
        ).first()  # fmt: skip
        if facts is None or not facts.n:
            raise SettingsError("the ledger is empty: run the app with App(…, ledger=Ledger())")
        if not facts.good:
            raise SettingsError(
                f"all {facts.n} records of the ledger cannot be read: is it a ledger's topic?"
            )
        self._ledger = self._ledger.where("readable")
        if facts.share != facts.most:
            self._only_share(facts.share)
        messages = self._spark.sql(_MESSAGES, ledger=self._ledger).persist(StorageLevel.DISK_ONLY)
        self._persisted.append(messages)
        self._look_at_times()
        self._look_at_order(messages)
        repeats = self._look_at_repeats(messages)
        whole = self._spark.sql(_WHOLE, messages=messages).first()
        assert whole is not None  # noqa: S101 - an aggregate has a row
        checked, gone = 0, 0
        if source is not None:
            finished = messages
            if committed is not None:
                finished = self._spark.sql(_MESSAGES, ledger=_judged(committed).where("readable"))
            begins = dict.fromkeys(until, 0) if stretch else _begins(messages)
            checked, gone = self._look_for_losses(source, begins, until, finished, facts.share)
            if stretch:  # what came before it, and was finished in it
                gone = 0
        return Audit(
            attempts=facts.attempts,
            messages=whole.messages,
            keys=whole.keys,
            owners=facts.owners,
            retried=whole.retried,
            unfinished=whole.unfinished,
            checked=checked,
            gone=gone,
            repeats=repeats,
            affinity=whole.one_owner / whole.keys if whole.keys else 1.0,
            share=facts.share,
            tally=self._tally,
            violations=self._with_timelines(),
            unreadable=facts.n - facts.good,
        )

    def _only_share(self, share: float) -> None:
        """The share was changed: only what was recorded all the time proves anything."""
        below = Ledger(share=share).below
        self._ledger = self._ledger.where(f"{SLOT_SQL} < {below}")

    def _look_at_times(self) -> None:
        """Attempts of a key that were open at the same time, and tasks that went back."""
        times = self._spark.sql(_TIMES, ledger=self._ledger)
        overlaps = _OVERLAPS.replace(":skew", str(self._skew))
        found = times.selectExpr("*", f"{overlaps} AS overlaps", f"{_BACK} AS back").where("overlaps OR back")

        def tell(row: Any) -> str:
            if row.overlaps:
                early = (row.busy_until - row.started) / 1e6
                return f"attempt {row.attempt} started {early:.6f} s before another one of its lane had ended"
            return f"its task went back: it had started offset {row.last.offset} before"

        self._add(found.selectExpr("*", f"if(overlaps, '{Flaw.OVERLAP}', '{Flaw.ORDER}') AS flaw"), tell)

    def _look_at_order(self, messages: DataFrame) -> None:
        """Messages that started before an earlier one of their lane was finished."""
        skew = str(self._skew)
        suspects = self._spark.sql(_SUSPECTS.replace(":skew", skew), messages=messages)
        lanes = self._small(suspects)
        if lanes is None:
            return
        bad = self._spark.sql(
            _ORDER.replace(":skew", skew), messages=messages.join(lanes, ["key", "partition"], "left_semi")
        )
        self._add(
            bad.withColumn("flaw", f.lit(Flaw.ORDER.value)),
            lambda row: (
                f"it started while offset {row.waits_for} was not finished"
                + (
                    ""
                    if row.waits_until == _NEVER
                    else f", {(row.waits_until - row.started) / 1e6:.6f} s too early"
                )
            ),
        )

    def _look_at_repeats(self, messages: DataFrame) -> dict[str, int]:
        """Messages that finished more than once, and why that may be; in the same life of a task it may not."""
        several = self._small(messages.where("finals > 1").select("key", "partition", "offset"))
        if several is None:
            return {}
        again = self._spark.sql(_AGAIN, ledger=self._ledger, several=several).where("before IS NOT NULL")
        counted = {row.why: row["count"] for row in again.groupBy("why").count().collect()}
        if counted.pop("same task", 0):
            twice = again.where("why = 'same task'").withColumn("flaw", f.lit(Flaw.REPEAT.value))
            self._add(twice, lambda _row: "the same task finished it twice")
        return {WHY[why]: count for why, count in counted.items()}

    def _small(self, frame: DataFrame) -> DataFrame | None:
        """What is expected to be little, worked out once; None when it is nothing."""
        kept = frame.persist(StorageLevel.DISK_ONLY)
        self._persisted.append(kept)
        count = kept.count()
        if not count:
            return None
        return f.broadcast(kept) if count <= _BROADCAST else kept

    def _look_for_losses(
        self,
        source: DataFrame,
        begins: Mapping[int, int],
        until: Mapping[int, int],
        finished: DataFrame,
        share: float,
    ) -> tuple[int, int]:
        """Messages of the source that are not finished.

        Compared by counts and a hash for every ten thousand offsets; only where these differ message by message.
        """
        places = [
            f"(partition = {p} AND offset >= {begins[p]} AND offset < {end})"
            for p, end in until.items()
            if p in begins
        ]
        if not places:
            return 0, 0
        within = " OR ".join(places)
        if share < 1:
            within = f"({within}) AND {SLOT_SQL} < {Ledger(share=share).below}"
        wanted = source.select("key", "partition", "offset").where(within)
        there = finished.where("finished IS NOT NULL").select("key", "partition", "offset").where(within)
        marks = [
            "partition", f"offset div {_BUCKET} AS bucket", "xxhash64(key, partition, offset) AS mark",
        ]  # fmt: skip

        def summed(frame: DataFrame, name: str) -> DataFrame:
            return (
                frame.selectExpr(*marks)
                .groupBy("partition", "bucket")
                .agg(f.count("*").alias(f"{name}_count"), f.expr("bit_xor(mark)").alias(f"{name}_mark"))
            )

        both = (
            summed(wanted, "source").join(summed(there, "ledger"), ["partition", "bucket"], "full").collect()
        )
        checked = sum(row.source_count or 0 for row in both)
        differ = [
            (row.partition, row.bucket)
            for row in both
            if (row.source_count, row.source_mark) != (row.ledger_count, row.ledger_mark)
        ]
        if not differ:
            return checked, 0
        buckets = self._spark.createDataFrame(differ, "partition INT, bucket BIGINT")
        near = f.broadcast(buckets)

        def only(frame: DataFrame) -> DataFrame:
            return frame.selectExpr("*", f"offset div {_BUCKET} AS bucket").join(
                near, ["partition", "bucket"]
            )

        on = ["partition", "offset"]
        missing = only(wanted).join(only(there).select(*on), on, "anti")
        missing = missing.withColumn("flaw", f.lit(Flaw.LOST.value))
        self._add(missing, lambda _row: "it is committed as done, and was never finished")
        gone = only(there).join(only(wanted).select(*on), on, "anti").count()
        return checked, gone

    def _add(self, bad: DataFrame, tell: Callable[[Any], str]) -> None:
        """Count them by ``flaw``, and keep the first of each kind. So many are counted here, more by another query."""
        order = ["started", "partition", "offset"] if "started" in bad.columns else ["partition", "offset"]
        rows = bad.orderBy(*order).limit(_COUNTED).collect()
        counts = Counter(row.flaw for row in rows)
        if len(rows) == _COUNTED:
            counts = Counter({row.flaw: row["count"] for row in bad.groupBy("flaw").count().collect()})
        kept: Counter[str] = Counter()
        for row in rows:
            kept[row.flaw] += 1
            if kept[row.flaw] <= _KEPT:
                self._found.append((Flaw(row.flaw), row, tell(row)))
        for flaw, count in counts.items():
            self._tally[Flaw(flaw)] = self._tally.get(Flaw(flaw), 0) + count

    def _with_timelines(self) -> tuple[Violation, ...]:
        """The counterexamples, each with the attempts of its lane around it."""
        if not self._found:
            return ()
        places = [
            (number, row.key, row.partition, row.offset) for number, (_, row, _) in enumerate(self._found)
        ]
        found = self._spark.createDataFrame(places, "id INT, key BINARY, partition INT, offset BIGINT")
        near: dict[int, list[Any]] = {}
        for row in self._spark.sql(_AROUND, ledger=self._ledger, found=f.broadcast(found)).collect():
            near.setdefault(row.id, []).append(row)
        return tuple(
            _violation(flaw, row, detail, near.get(number, []))
            for number, (flaw, row, detail) in enumerate(self._found)
        )


def _violation(flaw: Flaw, row: Any, detail: str, near: Iterable[Any]) -> Violation:
    events = _events(near)
    own = [
        e
        for e in events
        if (e.partition, e.offset) == (row.partition, row.offset) and e.kind is EventKind.START
    ]
    started = getattr(row, "started", None)
    shown = next((e for e in own if e.seq == (started or 0) * 1000), own[-1] if own else None)
    return Violation(
        flaw=flaw,
        detail=detail,
        key=None if row.key is None else bytes(row.key),
        partition=row.partition,
        offset=row.offset,
        event=shown,
        timeline=tuple(events),
    )


def _judged(ledger: DataFrame) -> DataFrame:
    final = ledger.withColumn("final", f.col("outcome").isin(*FINAL))
    return final.withColumn("readable", f.expr(_READABLE))


def _begins(messages: DataFrame) -> dict[int, int]:
    """Where the ledger begins, in every partition of the source."""
    found = messages.groupBy("partition").agg(f.min("offset").alias("least")).collect()
    return {row.partition: row.least for row in found}


def _events(rows: Iterable[Any]) -> list[HistoryEvent]:
    """Starts and ends of these attempts, in the order of time."""
    found = []
    for row in rows:
        place = (
            None if row.key is None else bytes(row.key),
            row.partition,
            row.offset,
            row.attempt,
            row.owner,
        )
        found.append(HistoryEvent(EventKind.START, *place, row.started / 1e6, row.started * 1000))
        found.append(HistoryEvent(EventKind.END, *place, row.ended / 1e6, row.ended * 1000, row.outcome))
    return sorted(found, key=lambda event: (event.seq, event.kind is EventKind.START))
