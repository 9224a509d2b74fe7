"""Several results of a message, in several topics, with the real broker."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, BrokerError, Message, Result, Transient
from keylane.kafka.cluster import Cluster
from support.tasks import Runner

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from keylane.spec import DeliveryMode
    from support.topics import Log, Row

pytestmark = pytest.mark.timeout(120)

BOTH = pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])


def splitting(name: str, fails: int = 0, **settings: Any) -> App:
    """Writes the words of a message by their first letter, and the message itself as a note."""
    app = App(name, source=f"{name}.in", sinks=(f"{name}.words", f"{name}.notes"), **settings)

    @app.stage
    def split(msg: Message) -> Iterator[Any]:
        for word in msg.value.split():
            yield Result(word, key=word[:1])
        if fails and msg.attempt == 1 and msg.offset % fails == 0:
            raise Transient("not yet")
        yield Result(msg.value, topic=f"{name}.notes", headers={"kind": "note"}, timestamp=1_700_000_000_000)

    return app


def by_key(rows: list[Row]) -> dict[bytes | None, list[bytes | None]]:
    """What each key has, repeats left out."""
    found: dict[bytes | None, dict[bytes | None, None]] = {}
    for row in rows:
        found.setdefault(row.key, {})[row.value] = None
    return {key: list(values) for key, values in found.items()}


@BOTH
def test_an_order_is_fanned_out_by_key(log: Log, name: str, tmp_path: Path, delivery: DeliveryMode) -> None:
    log.create(f"{name}.in", f"{name}.words", partitions=3)
    log.create(f"{name}.notes", partitions=1)
    sent = [{"key": b"one", "value": b"a%d b%d c%d" % (n, n, n)} for n in range(500)]
    log.send(f"{name}.in", sent)
    Runner(log, name, tmp_path, splitting(name, fails=7, delivery=delivery)).run()
    words, notes = log.read(f"{name}.words"), log.read(f"{name}.notes")
    assert by_key(words) == {
        letter: [letter + b"%d" % n for n in range(500)] for letter in (b"a", b"b", b"c")
    }
    assert by_key(notes) == {b"one": [each["value"] for each in sent]}
    assert (len(words), len(notes)) == (1500, 500)
    ids = {row.header("event-id") for row in words + notes}
    assert len(ids) == 2000
    assert {row.header("kind") for row in notes} == {b"note"}
    assert {row.timestamp for row in notes} == {1_700_000_000_000}
    assert log.lag(name, f"{name}.in") == 0


@BOTH
@pytest.mark.parametrize("known", [True, False], ids=["known limit", "unknown limit"])
def test_second_result_that_is_rejected_fails_its_message(
    log: Log,
    name: str,
    tmp_path: Path,
    delivery: DeliveryMode,
    known: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a limit that Keylane knows nothing of the message is written; else the broker says it after the first.

    With exactly_once nothing of it is visible in any case.
    """
    if not known:
        monkeypatch.setattr(Cluster, "rules", lambda *_: {})
    log.create(f"{name}.in", f"{name}.words", partitions=1)
    log.create(f"{name}.notes", partitions=1, max_message_bytes="20000")
    # As one word, which the first topic takes and the second does not.
    large = b"big" + b"".join(b"%x" % (n * 2654435761 & 0xFFFFFFFF) for n in range(6000))
    values = [b"a%d b%d" % (n, n) if n != 20 else large for n in range(40)]
    log.send(f"{name}.in", [{"key": b"k", "value": value} for value in values])
    Runner(log, name, tmp_path, splitting(name, delivery=delivery)).run()
    others = [value for value in values if value != large]
    assert by_key(log.read(f"{name}.notes")) == {b"k": others}
    assert [row.value for row in log.read(f"{name}.dlq")] == [large]
    words = log.read(f"{name}.words")
    assert by_key([row for row in words if row.value != large]) == {
        letter: [value.split()[place] for value in others] for place, letter in enumerate((b"a", b"b"))
    }
    seen = [row for row in words if row.value == large]
    if known or delivery == "exactly_once":
        assert seen == []
    else:
        assert seen, "it was durable before the broker rejected the second"
        assert len({row.header("event-id") for row in seen}) == 1, "a repeat has the same id"
    assert log.lag(name, f"{name}.in") == 0


def test_every_sink_is_checked_before_the_app_starts(log: Log, name: str) -> None:
    log.create(f"{name}.in", f"{name}.words", partitions=1)
    with pytest.raises(BrokerError, match=rf"a sink of app '{name}', topic '{name}\.notes'"):
        log.cluster.prepare(splitting(name).spec)


def test_a_tombstone_deletes_its_key_in_a_compacted_sink(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", partitions=1)
    log.create(f"{name}.out", partitions=1, cleanup_policy="compact")
    app = App(name, source=f"{name}.in", sink=f"{name}.out")

    @app.stage
    async def work(msg: Message) -> Any:
        return Result(None) if msg.value == b"gone" else msg.value

    at = int(time.time() * 1000)
    log.send(f"{name}.in", [{"key": b"k", "value": value, "timestamp": at} for value in (b"1", b"gone")])
    Runner(log, name, tmp_path, app).run()
    assert [(row.key, row.value) for row in log.read(f"{name}.out")] == [(b"k", b"1"), (b"k", None)]
