"""A producer of dead letters that fails for good. With a broker: tests/integration/test_dead_letters.py."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException

from keylane.dlq.spool_format import SpooledDeadLetter
from keylane.dlq.writer import DeadLetterWriter
from keylane.kafka.rejection import Rejections
from keylane.worker.session import WorkerSession
from support.state_log import identity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FATAL = ClientError(ClientError._FATAL, "sequence numbers are out of order", fatal=True)


class Producer:
    """Takes letters and answers when it is polled, with an error if it has failed."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.waiting: list[Callable[[Any, Any], None]] = []
        self.error: ClientError | None = None
        self.raises = False
        """Whether calls raise the error, as the client's do once it knows that it has failed."""

    def produce(self, _topic: str, value: bytes, *_: Any, on_delivery: Any, **__: Any) -> None:
        if self.raises:
            raise KafkaException(self.error)
        self.taken.append(value)
        self.waiting.append(on_delivery)

    def poll(self, _seconds: float) -> None:
        reports, self.waiting = self.waiting, []
        for report in reports:
            report(self.error, None)
        if self.raises:
            raise KafkaException(self.error)

    def purge(self, **_: Any) -> None:
        pass

    def __len__(self) -> int:
        return len(self.waiting)


class Session(WorkerSession):
    """The session's own way of making, polling and replacing producers, without a broker."""

    def __init__(self) -> None:
        self.identity = identity()
        self.alone = False
        self.made: list[Producer] = []
        self._clients = {}
        self._replaced = []

    def _create_producer(self, use: Any) -> Any:
        assert use == "letters"
        self.made.append(Producer())
        return self.made[-1]


def entry(value: bytes) -> SpooledDeadLetter:
    return SpooledDeadLetter(
        topic="chat.dlq", partition=0, key=b"k", value=value, headers=(), timestamp=1_700_000_000_000
    )


async def three_letters(session: Session, tmp_path: Path, raises: bool) -> list[tuple[bytes, str | None]]:
    """The first two find a producer that fails; the third is sent after that. Returns the answers."""
    app: Any = SimpleNamespace(delivery="at_least_once", spool=tmp_path, name="chat", dlq="chat.dlq")
    writer = DeadLetterWriter(session, app, Rejections())
    answers: list[tuple[bytes, str | None]] = []

    async def send(value: bytes) -> None:
        writer._send(entry(value), lambda problem, alone: answers.append((value, problem)))
        await asyncio.sleep(0)

    await send(b"in flight")
    failing = session.made[0]
    failing.error, failing.raises = FATAL, raises
    await send(b"next")
    session.poll()
    await send(b"last")
    session.poll()
    assert failing.taken == ([b"in flight"] if raises else [b"in flight", b"next"])
    writer.close()
    return answers


@pytest.mark.parametrize("raises", [False, True])
def test_letters_producer_with_a_fatal_error_is_replaced(tmp_path: Path, raises: bool) -> None:
    """Else no letter would be written any more. Each that it did not write is answered, and goes to the spool."""
    session = Session()
    answers = dict(asyncio.run(three_letters(session, tmp_path, raises)))
    assert len(session.made) == 2
    assert session.made[1].taken == [b"last"]
    assert answers.pop(b"last") is None
    assert sorted(answers) == [b"in flight", b"next"]
    assert all("sequence numbers are out of order" in str(problem) for problem in answers.values())


def test_letters_producer_with_a_passing_error_is_kept(tmp_path: Path) -> None:
    session = Session()

    async def main() -> None:
        app: Any = SimpleNamespace(delivery="at_least_once", spool=tmp_path, name="chat", dlq="chat.dlq")
        writer = DeadLetterWriter(session, app, Rejections())
        problems: list[str | None] = []
        writer._send(entry(b"a"), lambda problem, _alone: problems.append(problem))
        session.made[0].error = ClientError(ClientError._MSG_TIMED_OUT)
        session.poll()
        writer._send(entry(b"b"), lambda problem, _alone: problems.append(problem))
        session.made[0].error = None
        session.poll()
        assert len(problems) == 2
        assert problems[1] is None
        writer.close()

    asyncio.run(main())
    assert len(session.made) == 1
