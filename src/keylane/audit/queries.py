"""Spark SQL of the audit.

Windows over lanes begin with the key, so one shuffle of the ledger by key serves them all. ``:skew`` stands for
microseconds, and names in braces for DataFrames.
"""

from __future__ import annotations

DDL = "t STRING, i STRING, p INT, o BIGINT, a INT, w STRING, l STRING, s BIGINT, e BIGINT, r STRING, d INT, m DOUBLE"
"""The JSON of a record's value: see :mod:`keylane.ledger`."""
UNFINISHED = (1 << 63) - 1
"""The end of a message that never finished, in :data:`OVERTAKEN`."""
READABLE = """
coalesce(partition >= 0 AND offset >= 0 AND attempt >= 0 AND started BETWEEN 0 AND 253402300800000000
    AND ended BETWEEN 0 AND 253402300800000000 AND share > 0 AND share <= 1
    AND life IS NOT NULL AND owner IS NOT NULL AND outcome IS NOT NULL, false)
"""
"""True for a well-formed record: the topic may contain anything. Times must be before the year 10,000."""

ATTEMPTS = """
SELECT key, partition, offset, attempt, owner, life, started, ended, redriven,
       max(ended) OVER (PARTITION BY key ORDER BY started, ended, offset
                        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS busy_until,
       lag(struct(partition, offset, attempt, life, started, redriven))
           OVER (PARTITION BY key ORDER BY started, ended, offset) AS last
FROM {ledger} WHERE key IS NOT NULL AND attempt > 0
"""
"""Attempts, each with the attempt before it in its lane and the latest end of all before it."""
OVERLAPS = """
started < busy_until - :skew AND NOT (last.partition = partition AND last.offset = offset
    AND last.attempt = attempt AND last.life = life AND last.started = started)
"""
"""True for an attempt that started before all earlier ones had ended; a record that is there twice does not count."""
WENT_BACK = """
coalesce(last.life = life AND last.partition = partition AND offset < last.offset
    AND NOT redriven AND NOT last.redriven, false)
"""
"""True for an attempt whose task had already started a later message of the lane."""
MESSAGES = """
SELECT key, partition, offset,
       min(CASE WHEN attempt > 0 AND NOT redriven THEN started END) AS started,
       min(CASE WHEN final THEN ended END) AS finished,
       count_if(final) AS finals,
       max(attempt) AS most_attempts,
       min(owner) AS owner_a, max(owner) AS owner_b
FROM {ledger} GROUP BY key, partition, offset
"""
"""One row per message: its first start, its first end, and how often it finished."""
SUSPECT_LANES = """
SELECT DISTINCT key, partition FROM (
    SELECT key, partition, started, max(coalesce(finished, 9223372036854775807)) OVER (
               PARTITION BY key, partition ORDER BY offset ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS busy
    FROM {messages} WHERE key IS NOT NULL
) WHERE started < busy - :skew
"""
"""Lanes that may be out of order: the cheap half of the check, for all lanes."""
OVERTAKEN = """
SELECT * FROM (
    SELECT key, partition, offset, started,
           max(coalesce(finished, 9223372036854775807)) OVER lane AS waits_until,
           max_by(offset, coalesce(finished, 9223372036854775807)) OVER lane AS waits_for
    FROM {messages} WHERE key IS NOT NULL
    WINDOW lane AS (PARTITION BY key, partition ORDER BY offset ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
) WHERE started < waits_until - :skew
"""
"""Messages that started before an earlier one of their lane was finished, with that message."""
TOTALS = """
SELECT sum(n) AS messages, sum(unfinished) AS unfinished, sum(retried) AS retried,
       count_if(key IS NOT NULL) AS keys, count_if(key IS NOT NULL AND a = b) AS one_owner
FROM (SELECT key, count(*) AS n, count_if(finished IS NULL) AS unfinished, count_if(most_attempts > 1) AS retried,
             min(owner_a) AS a, max(owner_b) AS b
      FROM {messages} GROUP BY key)
"""
"""Counts over all messages."""
TIMELINE = """
SELECT * FROM (
    SELECT v.id, l.*, row_number() OVER (
               PARTITION BY v.id ORDER BY l.partition <> v.partition, abs(l.offset - v.offset), l.started) AS place
    FROM (SELECT DISTINCT * FROM {ledger} WHERE attempt > 0) l JOIN {found} v
        ON l.key = v.key OR (v.key IS NULL AND l.partition = v.partition AND l.offset = v.offset)
) WHERE place <= 12
"""
"""The attempts around each counterexample."""
REPEATS = """
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
"""Messages that finished again, and why."""
