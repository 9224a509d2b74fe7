"""``msg.request_id`` names an event: the same in every attempt, in every task, and from the dead letters."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from keylane import App, Message, Poison, Retry, Transient
from keylane.dlq.headers import dead_letter_headers, parse
from keylane.dlq.record import DeadLetter, DeadLetterMessage
from keylane.policies.failure_info import FailureInfo
from keylane.testing import Crash, Drain, Fault, Harness, MemoryRecord, Redrive
from support.state_log import identity

if TYPE_CHECKING:
    from keylane.message import Headers
    from keylane.policies.failure_policy import OnFailure

pytestmark = pytest.mark.usefixtures("quiet")

HEADERS: list[Headers] = [[], [("event-id", b"e-1"), ("trace", b"\xff")], [("event-id", b"")]]


def asked(
    headers: Headers, faults: list[Fault], error: Exception, on_failure: OnFailure = "skip"
) -> list[str]:
    """The request ids that a stage saw which fails until the tenth second."""
    app = App(
        "app",
        source="in",
        retry=Retry(attempts=5, wait_initial=8, wait_max=8),
        on_failure=on_failure,
        commit_interval=0.2,
        drain_timeout=0.5,
    )
    found: list[str] = []

    @app.stage
    async def ask(msg: Message) -> None:
        if msg.value == b"v":
            found.append(msg.request_id)
            if asyncio.get_running_loop().time() < 10:
                raise error

    run = Harness(app, partitions=1, seed=1, faults=faults)
    run.send(key=b"k", value=b"before")
    run.send(key=b"k", value=b"v", headers=headers)
    run.run()
    return found


@pytest.mark.parametrize("headers", HEADERS, ids=repr)
@pytest.mark.parametrize("faults", [[], [Crash(at=1), Drain(at=5), Crash(at=6)]], ids=["steady", "restarts"])
def test_a_request_id_stays_the_same_over_retries_and_restarts(headers: Headers, faults: list[Fault]) -> None:
    found = asked(headers, faults, Transient("not yet"))
    assert len(found) > 2
    assert len(set(found)) == 1


@pytest.mark.parametrize("headers", HEADERS, ids=repr)
@pytest.mark.parametrize("policy", ["skip", "park"])
def test_a_request_id_stays_the_same_when_a_message_is_redriven(headers: Headers, policy: OnFailure) -> None:
    found = asked(headers, [Redrive(at=12, key=b"k")], Poison("no"), policy)
    assert len(found) == 2
    assert len(set(found)) == 1


@pytest.mark.parametrize("headers", HEADERS, ids=repr)
@pytest.mark.parametrize("key", [b"k", None])
def test_a_letter_read_back_has_the_request_id_of_its_message(headers: Headers, key: bytes | None) -> None:
    message = Message(
        MemoryRecord(topic="in", partition=3, offset=1042, key=key, value=b"v", headers=headers, timestamp=7)
    )
    why = FailureInfo(
        stage="s", error="E", message="m", traceback="t", attempts=1, failed_at=1.0, failures=()
    )
    context = dead_letter_headers(
        "app", None, "dead", identity(message.topic).source, 3, 1042, message.timestamp, why
    )
    letter = parse(
        MemoryRecord(
            topic="app.dlq", partition=3, offset=17, key=key, value=b"v", headers=[*headers, *context]
        )
    )
    assert isinstance(letter, DeadLetter)
    again = Message(DeadLetterMessage(letter))
    assert (again.event_id, again.request_id) == (message.event_id, message.request_id)
