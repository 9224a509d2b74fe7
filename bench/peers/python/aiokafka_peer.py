# mypy: disable-error-code="import-not-found, import-untyped"
"""The plain asyncio consumer: getmany(), partitions at once, messages of a partition one after another.

``loops=partition``: a loop for each partition instead of one for all. A getmany() over all mostly returns one
partition's messages, so that with a slow handler only that partition would run.

Prints "P <time> <done>" lines. Runs until ``n`` messages are done, or endlessly.
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
        self._stages = [float(ms) / 1000 for ms in opt.get("stages", "").split(",") if ms]
        self._by_partition = opt.get("loops") == "partition"
        self._committed = 0.0
        self._done = 0
        self._safe: dict[Any, int] = {}  # next offset per partition: everything before it is done

    async def run(self) -> None:
        """Until all are done."""
        await self._consumer.start()
        await self._producer.start()
        report = asyncio.create_task(self._report())
        self._committed = time.time()
        if self._by_partition:
            while not self._consumer.assignment():  # noqa: ASYNC110 - the client has no event for it
                await asyncio.sleep(0.05)
            await asyncio.gather(*(self._loop(tp) for tp in self._consumer.assignment()))
        else:
            await self._loop()
        print("P", time.time(), self._done, flush=True)
        report.cancel()
        await self._consumer.commit(dict(self._safe))
        await self._producer.stop()
        await self._consumer.stop()

    async def _loop(self, *partitions: Any) -> None:
        while not self._n or self._done < self._n:
            got = await self._consumer.getmany(*partitions, timeout_ms=100, max_records=self._max)
            if got:
                await asyncio.gather(*(self._partition(tp, msgs) for tp, msgs in got.items()))
            if time.time() - self._committed > 1:
                self._committed = time.time()
                if self._safe:
                    await self._consumer.commit(dict(self._safe))

    async def _handle(self, msg: Any) -> Any:
        for seconds in self._stages:
            await asyncio.sleep(seconds)
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
