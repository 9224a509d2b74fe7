"""The chat pipeline: ingest, understand, answer, deliver. Every chat is a lane."""

from __future__ import annotations

import asyncio
from zlib import crc32

from keylane import App, Message, Poison, Retry, Transient
from keylane.demo.seed import parse_value

SOURCE, SINK = "chat.in", "chat.out"
INGEST, NLU, LLM, DELIVERY = 0.005, 0.020, (0.050, 0.080), 0.010
"""Seconds each stage takes; the language model between its two."""

app = App("chat", source=SOURCE, sink=SINK, retry=Retry(attempts=5, wait_initial=0.1, wait_max=2.0))


def draw(event_id: str, what: str) -> float:
    """A number in [0, 1) that is the same for this message every time: what fails, fails in every run alike."""
    return crc32(f"{what}/{event_id}".encode()) / 2**32


def is_poison(event_id: str) -> bool:
    """One message in two thousand cannot be understood, ever."""
    return draw(event_id, "poison") < 0.0005


def failures(event_id: str) -> int:
    """One message in ten fails when it is first answered, a tenth of those a second time."""
    drawn = draw(event_id, "fail")
    return 2 if drawn < 0.01 else 1 if drawn < 0.10 else 0


def stage_seconds(event_id: str) -> float:
    """What the stages of a message that does not fail take together."""
    return INGEST + NLU + _thinking(event_id) + DELIVERY


def _thinking(event_id: str) -> float:
    shortest, longest = LLM
    return shortest + (longest - shortest) * draw(event_id, "think")


@app.stage
async def ingest(msg: Message) -> bytes:
    """Take the message in."""
    await asyncio.sleep(INGEST)
    return bytes(msg.value)


@app.stage
async def understand(msg: Message) -> bytes:
    """Natural language understanding; what it cannot parse will never parse."""
    await asyncio.sleep(NLU)
    if is_poison(msg.event_id):
        raise Poison("not a language we know")
    parse_value(msg.value)
    return bytes(msg.value)


@app.stage
async def answer(msg: Message) -> bytes:
    """Ask the language model, which is overloaded now and then."""
    await asyncio.sleep(_thinking(msg.event_id))
    if msg.attempt <= failures(msg.event_id):
        raise Transient("the model is overloaded")
    return bytes(msg.value)


@app.stage
async def deliver(msg: Message) -> bytes:
    """Send the answer to the chat."""
    await asyncio.sleep(DELIVERY)
    return bytes(msg.value)
