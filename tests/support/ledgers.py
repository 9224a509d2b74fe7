"""Ledgers of any size, clean or with a flaw in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

PARTITIONS = 8
_COLUMNS = (
    "key", "partition", "offset", "attempt", "owner", "life", "started", "ended", "outcome", "redriven", "share",
)  # fmt: skip
PLANTED = 10
"""Which message of its lane has the flaw."""


class Ledgers:
    """``messages`` of ``keys`` keys, a multiple of 8 of them; every tenth has an attempt that failed before.

    A message of a lane begins every 1,000 microseconds and takes 800.
    """

    def __init__(self, spark: SparkSession, messages: int, keys: int) -> None:
        assert keys % PARTITIONS == 0
        self.spark, self.messages, self.keys = spark, messages, keys

    def source(self) -> DataFrame:
        """The messages."""
        return self.spark.range(self.messages).selectExpr(
            f"cast(concat('key-', id % {self.keys}) AS binary) AS key",
            f"cast(id % {self.keys} % {PARTITIONS} AS int) AS partition",
            f"id div {self.keys} * {self.keys // PARTITIONS} + id % {self.keys} div {PARTITIONS} AS offset",
            f"id % {self.keys} AS number",
            f"id div {self.keys} AS place",
        )

    def until(self) -> dict[int, int]:
        """Everything is committed."""
        return dict.fromkeys(range(PARTITIONS), self.messages)

    def clean(self) -> DataFrame:
        """A record for every attempt."""
        attempts = self.source().selectExpr(
            "*", "explode(if(number % 10 = 3, array(1, 2), array(1))) AS attempt", "number % 10 = 3 AS twice",
            "1700000000000000 + place * 1000 AS at",
        )  # fmt: skip
        return attempts.selectExpr(
            "key", "partition", "offset", "cast(attempt AS int) AS attempt",
            "concat('host:1/', number % 2) AS owner", "concat('1.', number % 2) AS life",
            "at + if(attempt = 2, 400, 0) AS started", "at + if(twice AND attempt = 1, 300, 800) AS ended",
            "if(twice AND attempt = 1, 'retry', 'ok') AS outcome", "false AS redriven", "1.0D AS share",
            "number", "place",
        )  # fmt: skip

    def planted(self, *flaws: str) -> DataFrame:
        """The clean one, and in the lane of a key for each flaw something that must not be."""
        ledger = self.clean()
        where = {flaw: 10 * number + 20 for number, flaw in enumerate(flaws)}  # keys without failures
        extra = []
        for flaw, number in where.items():
            of = f"number = {number} AND place = {PLANTED}"
            own = ledger.where(of)
            if flaw == "overlap":  # an owner that was replaced runs it too
                zombie = own.withColumns(
                    _as("'host:9/0'", "'9.1'", "started + 100", "started + 700", "'retry'")
                )
                extra.append(zombie)
            elif flaw == "overtaken":  # it fails, and comes through after the next one, elsewhere
                late = own.withColumns(_as("'host:9/0'", "'9.1'", "started + 1850", "started + 1950", "'ok'"))
                extra.append(late.withColumn("attempt", late.attempt + 1))
                first = own.withColumns(_as("owner", "life", "started", "ended", "'retry'"))
                ledger = ledger.where(f"NOT ({of})")
                extra.append(first)
            elif flaw == "lost":
                ledger = ledger.where(f"NOT ({of})")
            elif flaw == "double":  # the same task again
                extra.append(own.withColumns(_as("owner", "life", "started + 850", "started + 950", "'ok'")))
            elif flaw == "back":  # the same task starts an earlier one again, which does not come through
                back = own.withColumns(_as("owner", "life", "started + 1850", "started + 1950", "'retry'"))
                extra.append(back)
            else:
                assert flaw == "repeat", flaw  # no flaw: another task after a crash
                extra.append(
                    own.withColumns(_as("'host:9/0'", "'9.1'", "started + 850", "started + 950", "'ok'"))
                )
        for frame in extra:
            ledger = ledger.unionByName(frame)
        return ledger.select(*_COLUMNS)


def _as(owner: str, life: str, started: str, ended: str, outcome: str) -> dict[str, Column]:
    from pyspark.sql import functions as f  # noqa: PLC0415 - not for those who only import the module

    made = {"owner": owner, "life": life, "started": started, "ended": ended, "outcome": outcome}
    return {name: f.expr(text) for name, text in made.items()}
