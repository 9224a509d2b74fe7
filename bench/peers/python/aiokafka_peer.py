# mypy: disable-error-code="import-not-found, import-untyped"
"""The plain asyncio consumer: getmany() over all partitions, messages of a partition one after another.

Prints "P <time> <done>" lines. Runs until ``n`` messages are done, or for ever.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer


class Peer:
    """One consumer, one producer, one loop."""

    def __init__(self, opt: dict[str, str]) -> None:
        brokers, linger = opt["brokers"], int(opt.get("linger", "2"))
        self._out, self._n = opt["out"], int(opt.get("n", "0"))
        self._max = int(opt.get("max_records", "4000"))
        self._consumer = AIOKafkaConsumer(
            opt["topic"],
            bootstrap_servers=brokers,
            group_id=opt["group"],
            enable_auto_commit=False,
            auto_offset_reset="earliest",
        )
        self._producer = AIOKafkaProducer(
            bootstrap_servers=brokers, acks="all", linger_ms=linger, compression_type="lz4"
        )
        self._done = 0
        self._safe: dict[Any, int] = {}  # next offset per partition: everything before it is done

    async def run(self) -> None:
        """Until all are done."""
        await self._consumer.start()
        await self._producer.start()
        report = asyncio.create_task(self._report())
        committed = time.time()
        while not self._n or self._done < self._n:
            got = await self._consumer.getmany(timeout_ms=100, max_records=self._max)
            if got:
                await asyncio.gather(*(self._partition(tp, msgs) for tp, msgs in got.items()))
            if time.time() - committed > 1:
                committed = time.time()
                if self._safe:
                    await self._consumer.commit(dict(self._safe))
        print("P", time.time(), self._done, flush=True)
        report.cancel()
        await self._consumer.commit(dict(self._safe))
        await self._producer.stop()
        await self._consumer.stop()

    async def _handle(self, msg: Any) -> Any:
        return msg.value

    async def _partition(self, tp: Any, msgs: list[Any]) -> None:
        acks = []
        for m in msgs:
            value = await self._handle(m)
            acks.append(await self._producer.send(self._out, value, key=m.key))
        for ack in acks:
            await ack
        self._done += len(acks)
        self._safe[tp] = msgs[-1].offset + 1

    async def _report(self) -> None:
        while True:
            print("P", time.time(), self._done, flush=True)
            await asyncio.sleep(0.2)


async def main() -> None:
    """Clients are made inside the loop they use."""
    await Peer(dict(a.split("=", 1) for a in sys.argv[1:])).run()


if __name__ == "__main__":
    asyncio.run(main())
