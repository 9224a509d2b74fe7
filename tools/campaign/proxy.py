"""A proxy between the app and the broker that understands just enough of Kafka's protocol to harm it.

It cuts the streams into frames, tells requests by their api key, and puts its own ports in place of the brokers' in the
answers, so that clients come back to it: host and port stand next to each other there, with fixed width. It can
delay frames in both directions, which keeps their order, cut connections at a commit, and deliver the request that ends
a transaction late, when the next one has begun.
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
_ADD_OFFSETS, _END_TXN = 25, 26
_COMMITS = frozenset({8, _END_TXN, 28})  # OffsetCommit, EndTxn, TxnOffsetCommit
_LATE_SECONDS = 5.0
"""Time for the broker to answer a late request."""
_END = b""


class Cut(StrEnum):
    """What happens to a commit."""

    BEFORE = "before"
    """The connection is cut and the broker never gets it."""
    AFTER = "after"
    """The broker gets it, its answer is thrown away with the connection."""
    LATE = "late"
    """The connection is cut. The broker gets the request that ends a transaction on another connection, after the
    client's next try, when the next transaction of the same id has results and is about to get its offsets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What the proxy does now. Set as a whole by one thread and read by the loop."""

    delay: tuple[float, float] = (0.0, 0.0)
    cut: Cut | None = None
    late_by_itself: bool = True
    """Whether held requests are delivered when the next transaction gets its offsets; else by ``deliver_late``."""
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
        self._late: dict[bytes, tuple[int, bytes]] = {}  # by transactional id: broker port, request
        self._held: set[bytes] = set()  # held requests without their numbers: the client's next try passes

    @property
    def late(self) -> int:
        """How many requests are held now, to be delivered late."""
        return len(self._late)

    def deliver_late(self) -> dict[str, int]:
        """Deliver what is held now. Returns the broker's error code by transactional id.

        0: it was carried out; -1: the broker gave no answer.
        """
        return asyncio.run_coroutine_threadsafe(self._deliver(list(self._late)), self._loop).result(20)

    async def _deliver(self, ids: Sequence[bytes]) -> dict[str, int]:
        found = {}
        for name in ids:
            port, frame = self._late.pop(name)
            try:
                reader, writer = await asyncio.open_connection(HOST, port)
                writer.write(len(frame).to_bytes(4, "big") + frame)
                answer = await asyncio.wait_for(_frame(reader), _LATE_SECONDS)
                writer.close()
            except (OSError, TimeoutError):  # the broker is down: then it never gets it
                answer = _END
            # After the number of the request and the throttle time.
            error = int.from_bytes(answer[8:10], "big", signed=True) if len(answer) >= 10 else -1
            self.on_cut(f"the end of a transaction of {name.decode()} came late: error {error}")
            found[name.decode()] = error
        return found

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
                    self._requests(reader, requests, answers, asked, doomed, port),
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
        port: int,
    ) -> None:
        while frame := await _frame(reader):
            api, _version, number = struct.unpack_from(">hhi", frame)
            asked[number] = api
            weather = self.weather
            if api == _END_TXN and weather.cut is Cut.LATE and frame[8:] not in self._held:
                self._held.add(frame[8:])
                name = _transactional_id(frame)
                self._late[name] = (port, frame)
                self.on_cut(f"the end of a transaction of {name.decode()} is held, and its connection cut")
                break
            if (
                api == _ADD_OFFSETS
                and weather.late_by_itself
                and (name := _transactional_id(frame)) in self._late
            ):
                await self._deliver([name])
            if weather.cut in (Cut.BEFORE, Cut.AFTER) and api in _COMMITS:
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


def _transactional_id(frame: bytes) -> bytes:
    """Of a request that begins with it. Its version must be one whose header and strings have no variable lengths."""
    client = int.from_bytes(frame[8:10], "big", signed=True)
    at = 10 + max(0, client)
    size = int.from_bytes(frame[at : at + 2], "big")
    return frame[at + 2 : at + 2 + size]


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame without its length; empty at the end."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return _END
