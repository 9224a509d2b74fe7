"""The index of dead letters, without a broker."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from keylane.console import letter_index
from keylane.console.letter_index import PAGE_LETTERS, LetterIndex, LetterQuery
from keylane.dlq.record import DeadLetter, DeadLetterKind, ExpectedOrigin, UnreadableDeadLetter
from keylane.kafka.settings import KafkaSettings
from keylane.offsets.identity import TopicIdentity
from keylane.offsets.offset_runs import OffsetRuns

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HOME = ExpectedOrigin(app="chat", source=TopicIdentity(cluster="", topic="", id=""))
LETTER = DeadLetter(
    partition=0, offset=0, key=b"k", value=b"v", headers=(), headers_unreadable=None, topic="chat.in", topic_id="",
    cluster="", source_partition=0, source_offset=0, timestamp=None, kind=DeadLetterKind.DEAD, stage="send",
    error="shop.Refused", message="address 7 is unknown", traceback=None, attempts=1, failures=(), failed_at=1000.0,
    park=None, redrives=0, app="chat", app_version=None,
)  # fmt: skip


class Topic:
    """A dead-letter topic in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.letters: list[DeadLetter | UnreadableDeadLetter] = []
        self.begin = 0
        self.read: list[int] = []
        monkeypatch.setattr(letter_index, "Cluster", lambda _settings: self)
        monkeypatch.setattr(letter_index, "read_dead_letters", self._read)

    def topics(self) -> dict[str, int]:
        return {"chat.dlq": 1}

    def ends(self, _topic: str, _partitions: object, *, earliest: bool = False) -> dict[int, int]:
        return {0: self.begin if earliest else len(self.letters)}

    def add(self, **given: Any) -> None:
        given = {"source_offset": len(self.letters), **given}
        self.letters.append(replace(LETTER, offset=len(self.letters), **given))

    def _read(
        self,
        _settings: object,
        _topic: str,
        *,
        partitions: object,
        start: Mapping[int, int],
        end: Mapping[int, int],
    ) -> Iterator[DeadLetter | UnreadableDeadLetter]:
        self.read.append(end[0] - start[0])
        return iter(self.letters[start[0] : end[0]])


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Topic:
    return Topic(monkeypatch)


@pytest.fixture
def index() -> Iterator[LetterIndex]:
    made = LetterIndex(KafkaSettings("localhost:1"), "chat")
    yield made
    made.close()


def test_letters_are_grouped_by_cause_and_counted(topic: Topic, index: LetterIndex) -> None:
    for number in range(30):
        topic.add(
            key=b"k%d" % (number % 3), message=f"address {number} is unknown", failed_at=1000.0 + number
        )
    topic.add(key=None, stage="parse", error="ValueError", message="no", failed_at=2000.0)
    index.refresh(HOME, {})
    found = index.causes(LetterQuery(), 2000.0)
    assert (found["letters"], found["lanes"]) == (31, 3)
    first, second = found["causes"]
    assert (first["count"], first["lanes"], first["message"]) == (30, 3, "address # is unknown")
    assert (first["first"], first["last"]) == (1000.0, 1029.0)
    assert sum(first["trend"]) == 30
    assert (second["error"], second["count"]) == ("ValueError", 1)
    assert (found["stages"], found["errors"]) == (["parse", "send"], ["ValueError", "shop.Refused"])


@pytest.mark.parametrize(
    ("query", "count"),
    [
        (LetterQuery(), 6),
        (LetterQuery(key=b"a"), 3),
        (LetterQuery(stage="send"), 5),
        (LetterQuery(error="Refused"), 5),
        (LetterQuery(error="shop.Refused"), 5),
        (LetterQuery(error="efused"), 0),
        (LetterQuery(since=1003.0), 3),
        (LetterQuery(since=1003.0, until=1004.0), 1),
        (LetterQuery(kind=DeadLetterKind.ARCHIVED), 1),
        (LetterQuery(cause=2), 1),
    ],
)
def test_filter_chooses(topic: Topic, index: LetterIndex, query: LetterQuery, count: int) -> None:
    for number in range(6):
        topic.add(
            key=b"ab"[number % 2 : number % 2 + 1],
            failed_at=1000.0 + number,
            stage="parse" if number == 5 else "send",
            error="ValueError" if number == 5 else "shop.Refused",
            kind=DeadLetterKind.ARCHIVED if number == 4 else DeadLetterKind.DEAD,
        )
    index.refresh(HOME, {})
    assert index.causes(query, 2000.0)["letters"] == count
    assert len(index.page(query, 0)["letters"]) == count


def test_refresh_reads_only_what_is_new(topic: Topic, index: LetterIndex) -> None:
    topic.add()
    index.refresh(HOME, {})
    index.refresh(HOME, {})
    topic.add()
    index.refresh(HOME, {})
    assert topic.read == [1, 1]
    assert index.causes(LetterQuery(), 0)["letters"] == 2


def test_redriven_letters_are_left_out_unless_asked_for(topic: Topic, index: LetterIndex) -> None:
    for _ in range(5):
        topic.add()
    index.refresh(HOME, {})
    index.refresh(HOME, {0: OffsetRuns([1, 2, 3])})
    found = index.causes(LetterQuery(), 0)
    assert (found["letters"], found["redriven"]) == (2, 3)
    assert index.causes(LetterQuery(redriven=True), 0)["letters"] == 5
    assert [one["offset"] for one in index.page(LetterQuery(), 0)["letters"]] == [4, 0]


def test_letter_written_twice_counts_once(topic: Topic, index: LetterIndex) -> None:
    topic.add(source_offset=7)
    topic.add(source_offset=7)
    topic.add(source_offset=7, redrives=1)
    index.refresh(HOME, {})
    assert index.causes(LetterQuery(), 0)["letters"] == 2


def test_letters_that_retention_deleted_are_forgotten(topic: Topic, index: LetterIndex) -> None:
    for _ in range(5):
        topic.add()
    index.refresh(HOME, {})
    topic.begin = 3
    index.refresh(HOME, {})
    assert index.causes(LetterQuery(), 0)["letters"] == 2


def test_topic_that_was_created_again_is_read_again(topic: Topic, index: LetterIndex) -> None:
    for _ in range(5):
        topic.add()
    index.refresh(HOME, {})
    topic.letters.clear()
    topic.add(stage="new")
    index.refresh(HOME, {})
    found = index.causes(LetterQuery(), 0)
    assert (found["letters"], found["stages"]) == (1, ["new"])


def test_foreign_letters_are_listed_apart(topic: Topic, index: LetterIndex) -> None:
    topic.add(app="other")
    index.refresh(HOME, {})
    found = index.causes(LetterQuery(), 0)
    assert (found["letters"], found["unreadable"]) == (0, 1)
    assert "other" in found["unreadable_examples"][0]["reason"]


def test_hundred_thousand_letters_are_paged_quickly(topic: Topic, index: LetterIndex) -> None:
    for number in range(100_000):
        topic.letters.append(
            replace(
                LETTER,
                offset=number,
                source_offset=number,
                key=b"k%d" % (number % 5000),
                failed_at=float(number),
            )
        )
    index.refresh(HOME, {0: OffsetRuns([5])})
    began = time.perf_counter()
    assert index.causes(LetterQuery(), 100_000.0)["letters"] == 99_999
    assert len(index.page(LetterQuery(), 900)["letters"]) == PAGE_LETTERS
    assert len(index.page(LetterQuery(key=b"k7"), 0)["letters"]) == 20
    assert time.perf_counter() - began < 5


def test_hostile_text_is_stored_as_it_is(topic: Topic, index: LetterIndex) -> None:
    topic.add(stage="'; DROP TABLE letter; --", message="\ud800<script>", key=b"\xff\x00", error="%")
    index.refresh(HOME, {})
    (one,) = index.page(LetterQuery(stage="'; DROP TABLE letter; --", error="%"), 0)["letters"]
    assert one["message"] == r"\ud800<script>"
    assert one["key"] == "hex:ff00"
    assert index.page(LetterQuery(error="_"), 0)["letters"] == []
