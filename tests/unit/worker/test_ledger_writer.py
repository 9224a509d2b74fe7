from __future__ import annotations

import json
from typing import Any

import pytest

from keylane import App, Ledger, Message, Outcome, SettingsError
from keylane.ledger import FINAL, slot
from keylane.testing import MemoryRecord
from keylane.worker.commit import CommitBatch
from keylane.worker.ledger_writer import LedgerWriter


class Sink:
    """What a commit collects from the ledger."""

    def __init__(self) -> None:
        self.records: list[tuple[str, Any, bytes | None]] = []

    def collect(self, ledger: LedgerWriter) -> None:
        batch = CommitBatch(room=1000)
        ledger.collect(batch)
        self.records += [(one.topic, json.loads(one.value or b""), one.key) for one in batch.records]


class Behind:
    """The observer that the app had."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def started(self, message: Message, attempt: int) -> None:
        self.told.append(("started", attempt))

    def ended(self, message: Message, attempt: int, outcome: str) -> None:
        self.told.append(("ended", attempt, outcome))


def message(offset: int, key: bytes | None = b"k", outcome: Outcome = Outcome.OK) -> Any:
    found: Any = _Done(MemoryRecord(topic="in", partition=2, offset=offset, key=key, value=b""))
    found.outcome = outcome
    return found


class _Done(Message):
    """With what the engine knows of a delivery."""

    outcome: Outcome
    redriven = False
    source_id = "id-1"


def writer(rule: Ledger, **more: Any) -> tuple[LedgerWriter, Sink]:
    app = App("shop", source="in", ledger=rule, **more)
    return LedgerWriter(app.spec, rule, "host:1/0"), Sink()


def test_an_attempt_is_a_record_with_its_times_and_its_end() -> None:
    behind = Behind()
    made, sink = writer(Ledger(), observer=behind)
    for attempt, outcome in ((1, "retry"), (2, "ok")):
        made.started(message(7), attempt)
        made.ended(message(7), attempt, outcome)
    assert sink.records == [], "they wait for the progress that they prove"
    sink.collect(made)
    (topic, first, key), (_, second, _) = sink.records
    assert (topic, key) == ("shop.ledger", b"k")
    assert {**first, "s": 0, "e": 0, "l": ""} == {
        "t": "in", "i": "id-1", "p": 2, "o": 7, "a": 1, "w": "host:1/0", "l": "", "s": 0, "e": 0, "r": "retry",
    }  # fmt: skip
    assert first["s"] <= first["e"] <= second["s"] <= second["e"]
    assert (second["a"], second["r"], second["l"]) == (2, "ok", first["l"])
    assert behind.told == [("started", 1), ("ended", 1, "retry"), ("started", 2), ("ended", 2, "ok")]


def test_a_transaction_that_was_not_taken_loses_no_record() -> None:
    made, sink = writer(Ledger())
    made.started(message(1), 1)
    made.ended(message(1), 1, "ok")
    sink.collect(made)
    made.aborted()
    made.started(message(2), 1)
    made.ended(message(2), 1, "ok")
    sink.records.clear()
    sink.collect(made)
    assert [record["o"] for _, record, _ in sink.records] == [1, 2]
    made.committed()
    sink.records.clear()
    sink.collect(made)
    assert sink.records == []


def test_outcomes_without_an_attempt_are_recorded() -> None:
    made, sink = writer(Ledger())
    outcomes = [Outcome.OK, Outcome.DEAD, Outcome.SKIPPED, Outcome.PARKED, Outcome.DUPLICATE]
    made.done([message(offset, outcome=outcome) for offset, outcome in enumerate(outcomes)])
    sink.collect(made)
    assert [(r["o"], r["a"], r["r"]) for _, r, _ in sink.records] == [
        (2, 0, "skipped"), (3, 0, "parked"), (4, 0, "duplicate"),
    ]  # fmt: skip
    assert {outcome.value for outcome in Outcome} == set(FINAL)


def test_two_lives_of_a_process_are_distinct() -> None:
    found = set()
    for _ in range(2):
        made, sink = writer(Ledger())
        made.done([message(1, outcome=Outcome.PARKED)])
        sink.collect(made)
        found.add(sink.records[0][1]["l"])
    assert len(found) == 2


def test_a_share_has_all_messages_of_some_keys() -> None:
    rule = Ledger(share=0.25)
    keys = [b"k%d" % i for i in range(2_000)]
    chosen = {key for key in keys if rule.records(key, 0)}
    assert 400 < len(chosen) < 600
    assert all(rule.records(key, offset) == (key in chosen) for key in keys for offset in (1, 99))
    nobodys = sum(rule.records(None, offset) for offset in range(2_000))
    assert 400 < nobodys < 600
    assert slot(b"abc", 5) == slot(b"abc", 6) != slot(None, 5)


@pytest.mark.parametrize("share", [0, -1, 1.1, "all", None, True])
def test_a_share_is_a_share(share: Any) -> None:
    with pytest.raises(SettingsError, match="expected a number above 0, and 1 at most"):
        Ledger(share=share)


def test_the_ledger_is_an_option_of_the_app() -> None:
    with pytest.raises(SettingsError, match="ledger must be a Ledger"):
        App("shop", source="in", ledger=True)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="is the app's own topic"):
        App("shop", source="shop.ledger")
