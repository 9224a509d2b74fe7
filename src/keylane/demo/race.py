"""The race: the same messages through three apps that differ in their order alone, and what the judge sees of each."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Literal

from keylane.app import App

if TYPE_CHECKING:
    from keylane.message import Message

SOURCE = "race.in"
Order = Literal["none", "global", "key"]
ORDERS: tuple[Order, ...] = ("none", "global", "key")
TITLES = {
    "none": 'order="none": whoever is free takes the next',
    "global": 'order="global": one after another',
    "key": 'order="key": in order inside a key, keys at once',
}
TRACE_MESSAGES_MAX = 60
"""Messages of the trace that are kept."""
LIVE_TRACE_MESSAGES = 16
"""Messages of the live trace."""


def sink(order: Order) -> str:
    """Where that app's results go. It has one partition, whose order is the order in which messages finished."""
    return f"race.{order}"


def make_app(order: Order, work: float) -> App:
    """An app whose only stage waits, for half to one and a half of ``work`` seconds, as a call to others does."""
    app = App(
        f"race-{order}", source=SOURCE, sink=sink(order), order=order, on_failure="block", commit_interval=0.2
    )

    async def call(msg: Message) -> dict[str, Any]:
        started = time.time()
        await asyncio.sleep(work * duration(msg.event_id))
        return {"n": int(msg.value), "started": started, "finished": time.time()}

    app.stage(call)
    return app


def duration(event_id: str) -> float:
    """0.5 to 1.5, the same for the same message in every app."""
    return 0.5 + zlib.crc32(event_id.encode()) % 1001 / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """One message that is done."""

    number: int
    """Its place in the source, from 0."""
    key: int
    late: bool
    """A later message of its key had finished before it."""
    started: float
    finished: float
    """Unix times at which its handler got it, and was done with it."""


@dataclass(slots=True)
class Track:
    """What the judge sees of one app. The reader's thread writes it; who draws it reads."""

    order: Order
    messages: int
    began: float = inf
    """Unix time at which its handler got the first message: no client's start is in the figures."""
    done: int = 0
    last: float = 0.0
    """Unix time of the last result so far."""
    overtaken: int = 0
    """Messages that finished after a later one."""
    overtaken_in_key: int = 0
    """Messages that finished after a later one of their own key."""
    doubles: int = 0
    trace: list[Finish] = field(default_factory=list)
    """The first to finish, in the order in which they did."""
    finishes: list[Finish] = field(default_factory=list)
    """All so far, in the order in which they finished."""
    recent: deque[Finish] = field(default_factory=lambda: deque(maxlen=LIVE_TRACE_MESSAGES))
    """The last to finish so far."""
    _latest: int = -1
    _latest_of: dict[int, int] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)
    _spans: list[tuple[float, float]] = field(default_factory=list)

    def see(self, key: bytes, value: bytes) -> None:
        """A result, in the order of the sink."""
        said = json.loads(value)
        number, of = int(said["n"]), int(key.removeprefix(b"k"))
        if number in self._seen:
            self.doubles += 1
            return
        self._seen.add(number)
        late = number < self._latest_of.get(of, -1)
        self.overtaken += number < self._latest
        self.overtaken_in_key += late
        self._latest = max(self._latest, number)
        self._latest_of[of] = max(self._latest_of.get(of, -1), number)
        self._spans.append((said["started"], said["finished"]))
        self.began = min(self.began, said["started"])
        self.last = max(self.last, said["finished"])
        self.done += 1
        finish = Finish(number=number, key=of, late=late, started=said["started"], finished=said["finished"])
        self.finishes.append(finish)
        self.recent.append(finish)
        if len(self.trace) < TRACE_MESSAGES_MAX:
            self.trace.append(finish)

    @property
    def seconds(self) -> float:
        """From the first message in the handler to the last result so far."""
        return max(self.last - self.began, 1e-3) if self.done else 0.0

    @property
    def per_second(self) -> float:
        """Messages."""
        return self.done / self.seconds if self.done else 0.0

    @property
    def at_once(self) -> int:
        """How many messages were in the handler at the same time, at most."""
        moments = sorted(
            [(start, 1) for start, _ in list(self._spans)] + [(end, -1) for _, end in list(self._spans)]
        )
        most = now = 0
        for _, change in moments:
            now += change
            most = max(most, now)
        return most

    @property
    def sound(self) -> bool:
        """Whether all came, once, in the order that was promised."""
        kept = {
            "none": True,
            "global": not self.overtaken,
            "key": not self.overtaken_in_key,
        }[self.order]
        return kept and self.done == self.messages and not self.doubles
