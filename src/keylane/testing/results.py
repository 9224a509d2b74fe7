"""Checker of output topics: by key the order of the input, and each result exactly once."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from keylane.audit.violation import Flaw
from keylane.testing.findings import Findings
from keylane.testing.verdict import ResultsVerdict

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Sequence

_IDS_AROUND = 4
"""Ids shown on either side of the first difference."""


def check_results(
    input_records: Iterable[tuple[bytes | None, Hashable]],
    output_records: Iterable[tuple[bytes | None, Hashable]],
    *,
    allow_duplicates: bool = False,
    late: Collection[Hashable] = (),
) -> ResultsVerdict:
    """Compare (key, id) pairs of the source topic with those of the results, each in the order of its log.

    An id is unique inside its key. An id that was sent twice counts once, at its first place. Of repeated results, the
    first one decides the order; the others count as duplicates, which are violations unless ``allow_duplicates``.

    ``late`` results, such as those of redriven dead letters, may come after later results, and never before earlier
    ones. Keyless messages have no order. Without a key that has two results nothing is proved, and the verdict is not
    ok.
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
                findings.add(Flaw.UNKNOWN, f"result for {name!r}, which was not sent with this key", key=key)
            elif count > 1 and not allow_duplicates:
                findings.add(Flaw.REPEAT, f"{count} results for {name!r}", key=key)
    if not any(len(results) > 1 for key, results in found.items() if key is not None):
        findings.add(Flaw.THIN, f"{outputs} results and no key with two, so they prove nothing about order")
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
    """The expected id in each place. A late id is expected where it came, if all ids before it had come."""
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
    """By key, its ids in the order of their first appearance, with their counts; the total; the repeats."""
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
            part = slice(max(0, place - _IDS_AROUND), place + _IDS_AROUND + 1)
            shown = f"\n    sent    {list(sent[part])}\n    results {list(got[part])}"
            findings.add(Flaw.ORDER, f"expected a result for {wanted!r}, got {result!r}{shown}", key=key)
            return
