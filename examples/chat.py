"""A chat pipeline: understand, answer, deliver. Every chat is a lane.

Answers are slow, the language model is overloaded now and then, and one message cannot be understood at all. The app
runs while messages are being written. Inside a chat answers come in the order of the questions; a chat that retries
delays no other. The message that cannot be understood is among the dead letters, with the reason.

    python examples/chat.py
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any
from zlib import crc32

from playground import Playground, by_key, command, verdict

from keylane import App, Message, Poison, Publisher, Retry, Transient

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

app = App(
    "example-chat",
    source="example-chat.in",
    sink="example-chat.out",
    decode="json",
    retry=Retry(attempts=5, wait_initial=0.02, wait_max=0.2),
)


@app.stage
async def understand(msg: Message) -> dict[str, Any]:
    if msg.value["text"] == "":
        raise Poison("there is nothing to understand")
    return dict(msg.value)


@app.stage(max_concurrency=200, timeout=5.0)
async def answer(msg: Message) -> dict[str, Any]:
    await asyncio.sleep(0.02)
    if msg.attempt == 1 and overloaded(msg.event_id):
        raise Transient("the model is overloaded")
    return {"number": msg.value["number"], "answer": msg.value["text"].upper()}


@app.stage
async def deliver(msg: Message) -> str:
    await asyncio.sleep(0.005)
    return f"{msg.value['number']}: {msg.value['answer']}"


def overloaded(event_id: str) -> bool:
    """One message in ten, always the same ones."""
    return crc32(event_id.encode()) % 10 == 0


def main(messages: int = 2000, bootstrap: str | None = None, spark: SparkSession | None = None) -> bool:
    """Whether every chat got its answers, each once and in order."""
    chats = max(10, messages // 20)
    expected: dict[str, list[str]] = {}
    with Playground(bootstrap, spark) as place:
        place.topics(app.source, str(app.sink))
        query = app.start(place.spark, bootstrap=place.bootstrap)
        try:
            with Publisher(app.source, bootstrap=place.bootstrap, type="Said") as chat:
                for number in range(messages):
                    key, text = f"chat-{number % chats}", "" if number == 7 else f"question {number}"
                    chat.send({"number": number, "text": text}, key=key, event_id=f"m-{number}")
                    if text:
                        expected.setdefault(key, []).append(f"{number}: {text.upper()}")
                    if number % 100 == 99:
                        time.sleep(0.05)
            found = by_key(place.read(str(app.sink), messages - 1))
        finally:
            query.stop()
        letters = place.read(app.dlq, 1)
    retried = sum(overloaded(f"m-{number}") for number in range(messages) if number != 7)
    print(
        f"{sum(map(len, found.values())):,} answers in {len(found):,} chats; {retried:,} messages failed at first "
        f"and were tried again; {len(letters)} dead letter"
    )
    return verdict(
        every_chat_has_its_answers_each_once_and_in_order=found == expected,
        the_message_without_a_text_is_the_one_dead_letter=[letter.event_id for letter in letters] == ["m-7"],
        the_app_was_drained_when_it_stopped=query.drained,
    )


if __name__ == "__main__":
    sys.exit(command(main, messages=2000))
