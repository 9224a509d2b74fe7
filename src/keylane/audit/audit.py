"""Audit of a ledger with Spark SQL: it proves that an app kept its promises, or shows counterexamples.

The rules are those of ``keylane.testing.check``, which checks histories in memory. Only counts and counterexamples
are collected on the driver.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark import StorageLevel
from pyspark.sql import functions as f

from keylane.audit import queries
from keylane.audit.violation import EventKind, Flaw, HistoryEvent, Violation
from keylane.errors import SettingsError
from keylane.ledger import FINAL, SLOT_SQL, Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pyspark.sql import DataFrame, SparkSession

_SHOWN_PER_FLAW = 3
"""Counterexamples shown of each kind."""
_COLLECTED_ROWS = 1_000
"""Violations that are collected to count them; when there are more, a query counts them."""
_BROADCAST_ROWS = 100_000
"""A frame of at most this size goes to every task, instead of a shuffle of the ledger."""
_BUCKET_OFFSETS = 10_000
"""Offsets that are compared by one hash."""
REPEAT_REASONS = {
    "redriven": "redriven from the dead letters",
    "began again": "the same task began again: a transaction was aborted, or an epoch was not committed",
    "other task": "another task continued from the last commit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The result of an audit."""

    attempts: int
    messages: int
    keys: int
    owners: int
    retried: int
    """Messages with an attempt after the first."""
    unfinished: int
    """Messages that were started and not finished by the end of the ledger."""
    checked: int
    """Messages of the source that had to be finished; 0 when no source was given."""
    gone: int
    """Finished messages that retention has removed from the source."""
    repeats: Mapping[str, int]
    """How often messages finished again, by reason."""
    affinity: float
    """The share of keys that had exactly one owner."""
    share: float
    """The share of keys that the ledger records."""
    tally: Mapping[Flaw, int]
    """The number of violations of each kind."""
    violations: tuple[Violation, ...] = field(default=())
    """The first of each kind, with their timelines."""
    unreadable: int = 0
    """Malformed records of the ledger topic, which were left out."""

    @property
    def ok(self) -> bool:
        """True when no violation was found."""
        return not self.tally


def read_ledger(topic: DataFrame) -> DataFrame:
    """The attempts in a ledger topic that was read with ``keylane.topic``."""
    return topic.select("key", f.from_json(f.col("value").cast("string"), queries.DDL).alias("v")).selectExpr(
        "key", "v.p AS partition", "v.o AS offset", "v.a AS attempt", "v.w AS owner", "v.l AS life",
        "v.s AS started", "v.e AS ended", "v.r AS outcome", "coalesce(v.d, 0) = 1 AS redriven",
        "coalesce(v.m, 1.0D) AS share", "v.t AS topic", "v.i AS source_id",
    )  # fmt: skip


def audit(
    spark: SparkSession,
    ledger: DataFrame,
    *,
    source: DataFrame | None = None,
    until: Mapping[int, int] | None = None,
    committed: DataFrame | None = None,
    entire_source: bool = False,
    skew: float = 0.0,
) -> Audit:
    """Check a ledger against the app's promises.

    * ``ledger``: all recorded attempts; ``committed``: those of committed transactions, by default the same.
    * ``source``: the messages (``key``, ``partition``, ``offset``) that must be finished below the offsets ``until``.
      Without it, losses are not checked.
    * ``entire_source``: check all of ``source``; otherwise only what follows the first offset in the ledger.
    * ``skew``: seconds by which the clocks of owners may differ.

    Malformed records are counted and left out. Raises :class:`SettingsError` when no record is readable.
    """
    run = _AuditRun(spark, ledger, skew)
    try:
        return run.judge(source, until or {}, committed, entire_source=entire_source)
    finally:
        run.close()


class _AuditRun:
    """One audit: its persisted frames and its findings."""

    def __init__(self, spark: SparkSession, ledger: DataFrame, skew: float) -> None:
        self._spark = spark
        self._skew = round(skew * 1e6)
        count = int(spark.conf.get("spark.sql.shuffle.partitions") or 8)
        # One shuffle by key serves all windows and groups. On disk, because a ledger may be larger than memory.
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
        entire_source: bool,
    ) -> Audit:
        facts = self._ledger.selectExpr(
            "count(*) AS n", "count_if(readable) AS good", "count_if(readable AND attempt > 0) AS attempts",
            "min(share) FILTER (WHERE readable) AS share", "max(share) FILTER (WHERE readable) AS most",
            "approx_count_distinct(owner, 0.01) FILTER (WHERE readable) AS owners",
        ).first()  # fmt: skip
        if facts is None or not facts.n:
            raise SettingsError(
                "the ledger is empty: the app has processed no messages, or ran without App(…, ledger=Ledger())"
            )
        if not facts.good:
            raise SettingsError(
                f"all {facts.n} records of the ledger are malformed: check that the topic is a ledger topic"
            )
        self._ledger = self._ledger.where("readable")
        if facts.share != facts.most:
            self._limit_to_share(facts.share)
        messages = self._spark.sql(queries.MESSAGES, ledger=self._ledger).persist(StorageLevel.DISK_ONLY)
        self._persisted.append(messages)
        self._check_overlaps()
        self._check_order(messages)
        repeats = self._check_repeats(messages)
        whole = self._spark.sql(queries.TOTALS, messages=messages).first()
        assert whole is not None  # noqa: S101 - an aggregate has a row
        checked, gone = 0, 0
        if source is not None:
            finished = messages
            if committed is not None:
                finished = self._spark.sql(queries.MESSAGES, ledger=_judged(committed).where("readable"))
            begins = dict.fromkeys(until, 0) if entire_source else _begins(messages)
            checked, gone = self._check_losses(source, begins, until, finished, facts.share)
            if entire_source:  # these are older messages that finished in the given period
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

    def _limit_to_share(self, share: float) -> None:
        """Keep only the keys that were recorded all the time, after the ledger's share was changed."""
        below = Ledger(share=share).below
        self._ledger = self._ledger.where(f"{SLOT_SQL} < {below}")

    def _check_overlaps(self) -> None:
        """Find attempts of a lane that ran at the same time, and tasks that went back to an earlier message."""
        times = self._spark.sql(queries.ATTEMPTS, ledger=self._ledger)
        overlaps = queries.OVERLAPS.replace(":skew", str(self._skew))
        found = times.selectExpr("*", f"{overlaps} AS overlaps", f"{queries.WENT_BACK} AS back").where(
            "overlaps OR back"
        )

        def describe(row: Any) -> str:
            if row.overlaps:
                early = (row.busy_until - row.started) / 1e6
                return f"attempt {row.attempt} started {early:.6f} s before another one of its lane had ended"
            return f"its task went back: it had already started offset {row.last.offset}"

        self._add(found.selectExpr("*", f"if(overlaps, '{Flaw.OVERLAP}', '{Flaw.ORDER}') AS flaw"), describe)

    def _check_order(self, messages: DataFrame) -> None:
        """Find messages that started before an earlier one of their lane was finished."""
        skew = str(self._skew)
        suspects = self._spark.sql(queries.SUSPECT_LANES.replace(":skew", skew), messages=messages)
        lanes = self._materialized(suspects)
        if lanes is None:
            return
        bad = self._spark.sql(
            queries.OVERTAKEN.replace(":skew", skew),
            messages=messages.join(lanes, ["key", "partition"], "left_semi"),
        )
        self._add(
            bad.withColumn("flaw", f.lit(Flaw.ORDER.value)),
            lambda row: (
                f"it started while offset {row.waits_for} was not finished"
                + (
                    ""
                    if row.waits_until == queries.UNFINISHED
                    else f", {(row.waits_until - row.started) / 1e6:.6f} s too early"
                )
            ),
        )

    def _check_repeats(self, messages: DataFrame) -> dict[str, int]:
        """Count messages that finished more than once, by reason. Within one life of a task that is a violation."""
        several = self._materialized(messages.where("finals > 1").select("key", "partition", "offset"))
        if several is None:
            return {}
        again = self._spark.sql(queries.REPEATS, ledger=self._ledger, several=several).where(
            "before IS NOT NULL"
        )
        counted = {row.why: row["count"] for row in again.groupBy("why").count().collect()}
        if counted.pop("same task", 0):
            twice = again.where("why = 'same task'").withColumn("flaw", f.lit(Flaw.REPEAT.value))
            self._add(twice, lambda _row: "the same task finished it twice")
        return {REPEAT_REASONS[why]: count for why, count in counted.items()}

    def _materialized(self, frame: DataFrame) -> DataFrame | None:
        """A frame that is expected to be small, computed once; None when it is empty."""
        persisted = frame.persist(StorageLevel.DISK_ONLY)
        self._persisted.append(persisted)
        count = persisted.count()
        if not count:
            return None
        return f.broadcast(persisted) if count <= _BROADCAST_ROWS else persisted

    def _check_losses(
        self,
        source: DataFrame,
        begins: Mapping[int, int],
        until: Mapping[int, int],
        finished: DataFrame,
        share: float,
    ) -> tuple[int, int]:
        """Find messages of the source that are not finished; returns how many were checked, and how many are gone.

        Counts and hashes of offset buckets are compared first, and messages only in buckets that differ.
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
            "partition", f"offset div {_BUCKET_OFFSETS} AS bucket", "xxhash64(key, partition, offset) AS mark",
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
        differing = f.broadcast(buckets)

        def only(frame: DataFrame) -> DataFrame:
            return frame.selectExpr("*", f"offset div {_BUCKET_OFFSETS} AS bucket").join(
                differing, ["partition", "bucket"]
            )

        on = ["partition", "offset"]
        missing = only(wanted).join(only(there).select(*on), on, "anti")
        missing = missing.withColumn("flaw", f.lit(Flaw.LOST.value))
        self._add(missing, lambda _row: "it was committed as done and never finished")
        gone = only(there).join(only(wanted).select(*on), on, "anti").count()
        return checked, gone

    def _add(self, bad: DataFrame, describe: Callable[[Any], str]) -> None:
        """Count violations by their column ``flaw``, and keep the first of each kind."""
        order = ["started", "partition", "offset"] if "started" in bad.columns else ["partition", "offset"]
        rows = bad.orderBy(*order).limit(_COLLECTED_ROWS).collect()
        counts = Counter(row.flaw for row in rows)
        if len(rows) == _COLLECTED_ROWS:
            counts = Counter({row.flaw: row["count"] for row in bad.groupBy("flaw").count().collect()})
        kept: Counter[str] = Counter()
        for row in rows:
            kept[row.flaw] += 1
            if kept[row.flaw] <= _SHOWN_PER_FLAW:
                self._found.append((Flaw(row.flaw), row, describe(row)))
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
        around: dict[int, list[Any]] = {}
        for row in self._spark.sql(queries.TIMELINE, ledger=self._ledger, found=f.broadcast(found)).collect():
            around.setdefault(row.id, []).append(row)
        return tuple(
            _violation(flaw, row, detail, around.get(number, []))
            for number, (flaw, row, detail) in enumerate(self._found)
        )


def _violation(flaw: Flaw, row: Any, detail: str, around: Iterable[Any]) -> Violation:
    events = _events(around)
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
    return final.withColumn("readable", f.expr(queries.READABLE))


def _begins(messages: DataFrame) -> dict[int, int]:
    """The first offset in the ledger, by partition of the source."""
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
