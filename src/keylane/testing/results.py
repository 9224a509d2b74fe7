"""Judges an output topic: per key the same order as the input, each result exactly once."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from keylane.audit.violation import Flaw
from keylane.testing.findings import Findings
from keylane.testing.verdict import ResultsVerdict

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Sequence

_AROUND = 4  # ids shown on either side of the first difference


def check_results(
    input_records: Iterable[tuple[bytes | None, Hashable]],
    output_records: Iterable[tuple[bytes | None, Hashable]],
    *,
    allow_duplicates: bool = False,
    late: Collection[Hashable] = (),
) -> ResultsVerdict:
    """Compares (key, id) pairs of the source topic with those of the results, each in the order of its log.

    An id is unique inside its key; one that was sent twice counts once, at its first place. Of a result that is there
    more than once the first decides about the order; the others are counted as duplicates, and are a violation unless
    allowed. Those that are ``late``, as dead letters that were redriven, may come after what is behind them, and never
    before what is in front of them. Keyless messages have no order. No results, or no key with two, prove nothing: that
    is not ok.
    """
    expected, inputs, _ = _by_key(input_records)
    found, outputs, duplicates = _by_key(output_records)
    findings = Findings()
    missing = 0
    for key, ids in expected.items():
        results = found.get(key, {})
        if key is not None and list(ids) == list(results):
            continue
        gone = [name for name in ids if name not in results]
        missing += len(gone)
        for name in gone:
            findings.add(Flaw.LOST, f"no result for {name!r}", key=key)
        if key is not None:
            wanted, got = [n for n in ids if n in results], [n for n in results if n in ids]
            _compare(findings, key, _due(wanted, got, late) if late else wanted, got)
    for key, results in found.items():
        known = expected.get(key, {})
        for name, count in results.items():
            if name not in known:
                findings.add(
                    Flaw.UNKNOWN, f"a result for {name!r}, which was not sent under this key", key=key
                )
            elif count > 1 and not allow_duplicates:
                findings.add(Flaw.REPEAT, f"{count} results for {name!r}", key=key)
    if not any(len(results) > 1 for key, results in found.items() if key is not None):
        findings.add(Flaw.THIN, f"{outputs} results, and no key with two: order was never put to the test")
    return ResultsVerdict(
        violations=findings.violations(),
        tally=findings.tally,
        inputs=inputs,
        outputs=outputs,
        keys=len(expected),
        duplicates=duplicates,
        missing=missing,
    )


def _due(wanted: Sequence[Hashable], got: Sequence[Hashable], late: Collection[Hashable]) -> list[Hashable]:
    """What was due in each place: the late ones where they came, if everything in front of them was there."""
    place = {name: number for number, name in enumerate(wanted)}
    left = deque(name for name in wanted if name not in late)
    due = []
    for name in got:
        fits = name in late and (not left or place[name] < place[left[0]])
        due.append(name if fits or not left else left.popleft())
    return due


def _by_key(
    records: Iterable[tuple[bytes | None, Hashable]],
) -> tuple[dict[bytes | None, dict[Hashable, int]], int, int]:
    """Per key its ids in the order of their first appearance, with their number; how many in all; how many again."""
    keys: dict[bytes | None, dict[Hashable, int]] = {}
    total = again = 0
    for key, name in records:
        total += 1
        ids = keys.get(key)
        if ids is None:
            ids = keys[key] = {}
        if name in ids:
            ids[name] += 1
            again += 1
        else:
            ids[name] = 1
    return keys, total, again


def _compare(findings: Findings, key: bytes, sent: Sequence[Hashable], got: Sequence[Hashable]) -> None:
    for place, (wanted, result) in enumerate(zip(sent, got, strict=True)):
        if wanted != result:
            part = slice(max(0, place - _AROUND), place + _AROUND + 1)
            shown = f"\n    sent    {list(sent[part])}\n    results {list(got[part])}"
            findings.add(Flaw.ORDER, f"result {result!r} where {wanted!r} was due{shown}", key=key)
            return
