from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException

from keylane.errors import AbortedError, FencedError
from keylane.kafka import transactional_client, transactional_writer
from keylane.kafka.transactional_client import TransactionalClient
from keylane.kafka.transactional_writer import TransactionalWriter
from keylane.state.labels import Labels


class Client:
    """A transactional client whose commits take until the test ends them."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.failure = None
        self.open = False
        self.records: list[bytes] = []
        self.go = threading.Event()

    def begin(self) -> None:
        self.open = True

    def put(self, record: tuple[Any, ...]) -> None:
        self.open = True
        self.records.append(record[1])

    def commit(self, _offsets: list[Any]) -> dict[int, int]:
        self.go.wait(10)
        self.open = False
        return {}


def test_nothing_enters_a_commit_that_outlives_its_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its progress is taken: a result that came in behind it would be there twice when its message runs again."""
    monkeypatch.setattr(transactional_writer, "TransactionalClient", Client)
    writer = TransactionalWriter(None, "app", "app.state", None, labels=Labels(None), exact=True)  # type: ignore[arg-type]
    client: Any = writer._client

    async def main() -> None:
        writer.attach()
        writer.put("out", b"before", b"k")
        committing = asyncio.ensure_future(writer.commit())
        await asyncio.sleep(0.05)
        writer.put("out", b"behind", b"k")
        assert not committing.done()

    asyncio.run(main())  # it ends while the transaction is being committed
    client.go.set()
    assert client.records == [b"before"]


class Aborting(Client):
    """Its first commits are aborted, cleanly, so it continues."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.aborts = 1
        self.committed: list[bytes] = []

    def commit(self, _offsets: list[Any]) -> dict[int, int]:
        records, self.records, self.open = self.records, [], False
        if self.aborts:
            self.aborts -= 1
            raise AbortedError("transaction not committed")
        self.committed += records
        return {}

    def on_delivery(self, _error: Any, _message: Any) -> None:
        pass


def aborting(monkeypatch: pytest.MonkeyPatch, aborts: int = 1) -> tuple[TransactionalWriter, Aborting]:
    monkeypatch.setattr(transactional_writer, "TransactionalClient", Aborting)
    writer = TransactionalWriter(None, "app", "app.state", None, labels=Labels(None))  # type: ignore[arg-type]
    client: Any = writer._client
    client.aborts = aborts
    return writer, client


def test_notes_of_an_aborted_transaction_are_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, client = aborting(monkeypatch, aborts=2)
    told: list[str | None] = []

    async def main() -> None:
        writer.attach()
        writer.put_state(0, b"lane/k", b"blocked", told.append)
        writer.put_state(0, b"order", b"done", told.append)
        for _ in range(2):
            with pytest.raises(AbortedError):
                await writer.commit()
            assert writer.has_records
        writer.put_state(0, b"lane/k", b"free", told.append)
        await writer.commit()

    asyncio.run(main())
    assert client.committed == [b"blocked", b"done", b"free"]
    assert told == [None] * 3


def test_progress_of_an_aborted_transaction_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is collected again for the next one: written without its offsets it would be ahead of them."""
    writer, client = aborting(monkeypatch)
    told: list[str | None] = []

    async def main() -> None:
        writer.attach()

        async def progress(value: bytes) -> None:
            offsets: list[Any] = ["offset"]
            async with writer.exclusive():
                writer.put_state(0, b"lane/k", b"blocked", told.append)
                ledger = "ledger", b"l" + value, b"k", -1, (), None
                await writer.commit_with(offsets, [(0, b"progress", value)], [ledger])

        with pytest.raises(AbortedError):
            await progress(b"5")
        assert told == []
        await writer.commit()
        assert client.committed == [b"blocked"]
        assert told == [None]
        client.committed.clear()
        await progress(b"6")

    asyncio.run(main())
    assert client.committed == [b"blocked", b"6", b"l6"]


def test_a_note_larger_than_its_topic_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, client = aborting(monkeypatch, aborts=0)
    writer.limit = 1_000
    told: list[str | None] = []

    async def main() -> None:
        writer.attach()
        writer.put_state(0, b"lane/" + b"k" * 1_000, b"blocked", told.append)
        assert told == [], "never from inside the call"
        writer.put_state(0, b"lane/k", b"blocked", told.append)
        await writer.commit()

    asyncio.run(main())
    assert client.committed == [b"blocked"]
    assert told[1:] == [None]
    assert "larger than topic 'app.state' takes" in str(told[0])


def test_a_record_larger_than_its_topic_takes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no transaction could be committed any more: the record would be in each of them."""
    writer, client = aborting(monkeypatch, aborts=0)
    writer.limits = {"app.ledger": 1_000}

    async def main() -> None:
        writer.attach()
        async with writer.exclusive():
            await writer.commit_with(
                records=[
                    ("app.ledger", b"1", b"k" * 1_000, -1, (), None),
                    ("app.ledger", b"2", b"k", -1, (), None),
                    ("other", b"3", b"k" * 1_000, -1, (), None),
                ]
            )

    asyncio.run(main())
    assert client.committed == [b"2", b"3"]


def test_a_note_that_the_broker_rejects_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, client = aborting(monkeypatch)
    told: list[str | None] = []

    async def main() -> None:
        writer.attach()
        writer.put_state(0, b"large", b"1", told.append)
        writer.put_state(0, b"small", b"2", told.append)
        rejected = SimpleNamespace(key=lambda: b"large")
        writer._on_delivery(ClientError(ClientError.MSG_SIZE_TOO_LARGE), rejected)
        with pytest.raises(AbortedError):
            await writer.commit()
        await writer.commit()

    asyncio.run(main())
    assert client.committed == [b"2"]
    assert "large" in str(told[0]).lower()
    assert told[1:] == [None]


class Fenced:
    """A producer that the broker has fenced: by its own clock, or for another one of the same id."""

    def begin_transaction(self) -> None:
        pass

    def produce(self, *_: Any) -> None:
        raise KafkaException(ClientError(ClientError._FENCED, fatal=True))

    def send_offsets_to_transaction(self, *_: Any) -> None:
        raise KafkaException(ClientError(ClientError._FENCED, fatal=True))

    def __len__(self) -> int:
        return 0


def fenced(monkeypatch: pytest.MonkeyPatch, *, after: float, exact: bool) -> TransactionalClient:
    """Transactions of which one was opened this many seconds ago."""
    monkeypatch.setattr(transactional_client, "transactional_producer", lambda *_, **__: Fenced())
    client = TransactionalClient(None, "app.1", None, exact=exact)  # type: ignore[arg-type]
    now = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(transactional_client, "time", clock)
    client.begin()
    clock.monotonic = lambda: now + after
    return client


@pytest.mark.parametrize("exact", [True, False])
def test_a_transaction_that_timed_out_is_not_called_fenced(
    monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    client = fenced(monkeypatch, after=61.0, exact=exact)
    with pytest.raises(AbortedError, match=r"timed out: it was open for 61 s.*event loop was blocked"):
        client.put(("out", b"v", b"k", -1, None, None, 0, []))
    with pytest.raises(AbortedError, match="timed out"):
        client.begin()
    client = fenced(monkeypatch, after=75.0, exact=exact)
    with pytest.raises(AbortedError, match="open for 75 s"):
        client.commit(["offset"])  # type: ignore[list-item]


@pytest.mark.parametrize("exact", [True, False])
def test_a_transaction_that_was_fenced_in_time_is_fenced(
    monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    client = fenced(monkeypatch, after=59.0, exact=exact)
    with pytest.raises(FencedError, match="another task has taken over"):
        client.put(("out", b"v", b"k", -1, None, None, 0, []))


class Uncertain(Aborting):
    """Its commits succeed, but a request got no answer at its first try."""

    def commit(self, _offsets: list[Any]) -> dict[int, int]:
        committed = super().commit(_offsets)
        self.failure = AbortedError("a request got no answer")  # type: ignore[assignment]
        return committed


def test_records_wait_for_a_new_client_after_an_uncertain_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was committed is not sent again, and the next transaction is one of the new producer epoch."""
    clients: list[Uncertain] = []

    def connect(*_: Any, **__: Any) -> Uncertain:
        clients.append(Uncertain())
        clients[-1].aborts = 0
        return clients[-1]

    monkeypatch.setattr(transactional_writer, "TransactionalClient", connect)
    monkeypatch.setattr(Uncertain, "discard", lambda _self: None, raising=False)
    writer = TransactionalWriter(None, "app", "app.state", None, labels=Labels(None))  # type: ignore[arg-type]
    told: list[str | None] = []

    async def main() -> None:
        writer.attach()
        writer.check()
        writer.put_state(0, b"lane/k", b"blocked", told.append)
        await writer.commit()
        assert told == [None]
        writer.put_state(0, b"lane/k", b"free", told.append)
        assert clients[0].records == []
        assert writer.has_records
        with pytest.raises(AbortedError, match="no answer"):
            writer.check()
        await asyncio.to_thread(writer.reconnect)
        writer.resume()
        await writer.commit()

    asyncio.run(main())
    assert [client.committed for client in clients] == [[b"blocked"], [b"free"]]
    assert told == [None] * 2
