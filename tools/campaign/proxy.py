"""A proxy between the app and the broker that understands just enough of Kafka's protocol to harm it.

It cuts the streams into frames, tells requests by their api key, and puts its own ports in place of the brokers' in the
answers, so that clients come back to it: host and port stand next to each other there, with fixed width. It can
delay frames in both directions, which keeps their order, and cut connections at a commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

HOST = "127.0.0.1"
_FETCH = 1
_COMMITS = frozenset({8, 26, 28})  # OffsetCommit, EndTxn, TxnOffsetCommit
_END = b""


class Cut(StrEnum):
    """What happens to a commit."""

    BEFORE = "before"
    """The connection is cut and the broker never gets it."""
    AFTER = "after"
    """The broker gets it, its answer is thrown away with the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What the proxy does now. Set as a whole by one thread and read by the loop."""

    delay: tuple[float, float] = (0.0, 0.0)
    cut: Cut | None = None
    rng: random.Random | None = None

    def wait(self) -> float:
        """Seconds for one frame."""
        return self.rng.uniform(*self.delay) if self.rng is not None else 0.0


class _Line:
    """One direction of one connection: frames leave in the order in which they came, each at its time."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._frames: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._due = 0.0

    def put(self, frame: bytes, wait: float) -> None:
        self._due = max(self._due, time.monotonic() + wait)
        self._frames.put_nowait((self._due, frame))

    async def run(self) -> None:
        """Until the end was put in, or the other side has gone."""
        with contextlib.suppress(ConnectionError):
            while True:
                due, frame = await self._frames.get()
                if (wait := due - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
                if frame == _END:
                    break
                self._writer.write(len(frame).to_bytes(4, "big") + frame)
                await self._writer.drain()
        self._writer.close()


class Proxy:
    """Listens on one port for each broker port, on a thread of its own. Used as a context manager."""

    def __init__(self, ports: Sequence[int], on_cut: Callable[[str], None] = lambda _what: None) -> None:
        self.weather = Weather()
        self.on_cut = on_cut
        self._ports = tuple(ports)
        self._own: dict[int, int] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._servers: list[asyncio.Server] = []

    @property
    def bootstrap(self) -> str:
        return ",".join(f"{HOST}:{self._own[port]}" for port in self._ports)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _open(self) -> None:
        for port in self._ports:
            server = await asyncio.start_server(self._serve(port), HOST, 0)
            self._servers.append(server)
            self._own[port] = server.sockets[0].getsockname()[1]
        self._swaps = [
            (HOST.encode() + struct.pack(">i", theirs), HOST.encode() + struct.pack(">i", own))
            for theirs, own in self._own.items()
        ]

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _serve(self, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                upstream, up = await asyncio.open_connection(HOST, port)
            except OSError:
                writer.close()
                return
            asked: dict[int, int] = {}  # correlation id -> api key
            doomed: set[int] = set()
            requests, answers = _Line(up), _Line(writer)
            jobs = [
                asyncio.ensure_future(job)
                for job in (
                    requests.run(),
                    answers.run(),
                    self._requests(reader, requests, answers, asked, doomed),
                    self._answers(upstream, requests, answers, asked, doomed),
                )
            ]
            try:
                await asyncio.gather(*jobs, return_exceptions=True)
            except asyncio.CancelledError:
                for job in jobs:
                    job.cancel()
            finally:
                up.close()
                writer.close()

        return serve

    async def _requests(
        self,
        reader: asyncio.StreamReader,
        requests: _Line,
        answers: _Line,
        asked: dict[int, int],
        doomed: set[int],
    ) -> None:
        while frame := await _frame(reader):
            api, _version, number = struct.unpack_from(">hhi", frame)
            asked[number] = api
            weather = self.weather
            if weather.cut is not None and api in _COMMITS:
                self.on_cut(f"a commit (api {api}) is cut off {weather.cut} it came to the broker")
                if weather.cut is Cut.BEFORE:
                    break
                doomed.add(number)
            requests.put(frame, weather.wait())
        requests.put(_END, 0.0)
        answers.put(_END, 0.0)

    async def _answers(
        self,
        reader: asyncio.StreamReader,
        requests: _Line,
        answers: _Line,
        asked: dict[int, int],
        doomed: set[int],
    ) -> None:
        while frame := await _frame(reader):
            number = int.from_bytes(frame[:4], "big", signed=True)
            if number in doomed:
                break
            if asked.pop(number, _FETCH) != _FETCH:  # fetched data belongs to the users
                for theirs, own in self._swaps:
                    frame = frame.replace(theirs, own)
            answers.put(frame, self.weather.wait())
        answers.put(_END, 0.0)
        requests.put(_END, 0.0)


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame without its length; empty at the end."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return _END
