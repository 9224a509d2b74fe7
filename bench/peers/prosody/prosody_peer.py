# mypy: disable-error-code="import-not-found, import-untyped, misc"
"""prosody-events: a Rust core reads and orders by key, asyncio handlers run keys at once.

On a real broker the library insists on Cassandra (``cassandra=host:port``), in all of its modes. It reads JSON only,
and the handler sees no headers: the event id is taken from the payload.

``defer=0``: failed messages of the default pipeline mode are retried in place. Prints "P <time> <done>" lines.
Runs until ``n`` messages are done, or endlessly.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from prosody import EventHandler, ProsodyClient, TransientError


def fnv32a(data: bytes) -> int:
    """The hash by which all peers choose what fails."""
    found = 0x811C9DC5
    for byte in data:
        found = ((found ^ byte) * 0x01000193) & 0xFFFFFFFF
    return found


class Handler(EventHandler):
    """Sleeps, fails at first where it is to, and sends the message on."""

    def __init__(self, send: Any, stages: list[float], fail: int) -> None:
        self._send, self._stages, self._fail = send, stages, fail
        self._failed: set[str] = set()
        self.done = 0

    async def on_message(self, _context: Any, message: Any) -> None:
        """One message."""
        for seconds in self._stages:
            await asyncio.sleep(seconds)
        if self._fail:
            # The context's count of retries is none of attempts: what queued behind a deferred message starts at 1.
            event = message.payload.split("|", 3)[2]
            if fnv32a(event.encode()) % 100 < self._fail and event not in self._failed:
                self._failed.add(event)
                raise TransientError("failed")
        await self._send(message.key, message.payload)
        self.done += 1

    async def on_excise(self, _context: Any, _message: Any) -> None:
        """Not used."""

    async def on_timer(self, _context: Any, _timer: Any) -> None:
        """Not used."""


async def main() -> None:
    """Run it."""
    opt = dict(a.split("=", 1) for a in sys.argv[1:])
    out, n = opt["out"], int(opt.get("n", "0"))
    client = await ProsodyClient.create(
        bootstrap_servers=opt["brokers"],
        group_id=opt["group"],
        source_system=opt["group"] + "-out",
        subscribed_topics=opt["topic"],
        cassandra_nodes=opt["cassandra"],
        mode="pipeline",
        defer_enabled=opt.get("defer", "1") == "1",
        max_concurrency=1000,
        max_uncommitted=10000,
        poll_interval=0.01,
        commit_interval=1.0,
        scheduler_cache_size=65536,
        monopolization_cache_size=65536,
        telemetry_enabled=False,
        probe_port=None,
        peer_bind_address="127.0.0.1:0",
    )

    async def send(key: str, payload: str) -> None:
        await client.send(out, key, payload)

    stages = [float(ms) / 1000 for ms in opt.get("stages", "").split(",") if ms]
    handler = Handler(send, stages, int(opt.get("fail", "0")))
    await client.subscribe(handler)
    while not n or handler.done < n:
        report(handler.done)
        await asyncio.sleep(0.1)
    report(handler.done)
    await client.shutdown()
    sys.stdout.flush()
    os._exit(0)  # the library's threads outlive the interpreter at times, and abort then (0.6.1)


def report(done: int) -> None:
    """In one write: the library logs to the same file."""
    sys.stdout.write(f"P {time.time()} {done}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
