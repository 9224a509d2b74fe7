from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from confluent_kafka import KafkaException

from keylane import App
from keylane.engine.delivery import Delivery
from keylane.kafka.output import KafkaOutput
from keylane.testing.log import MemoryRecord

if TYPE_CHECKING:
    from keylane.engine.engine import Engine
    from keylane.kafka.graveyard import Graveyard
    from keylane.kafka.seat import Seat


class Useless:
    """A client that takes nothing any more, as after a fatal error."""

    def produce(self, *_record: Any) -> None:
        raise KafkaException("fatal")


async def _gathered_for_a_useless_client() -> BaseException:
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    engine = cast("Engine", SimpleNamespace(fail=failed.set_result))
    seat = cast("Seat", SimpleNamespace(scribe=None, producer=Useless()))
    output = KafkaOutput(seat, cast("Graveyard", None), App("a", source="in", sink="out"), limit=1_000_000)
    record = MemoryRecord(topic="in", partition=0, offset=0, key=b"k", value=b"v", timestamp=0)
    output.result(Delivery(record, engine), b"v")
    return await asyncio.wait_for(failed, 2)


def test_a_client_that_takes_no_results_ends_the_task_also_when_they_were_gathered() -> None:
    assert isinstance(asyncio.run(_gathered_for_a_useless_client()), KafkaException)
