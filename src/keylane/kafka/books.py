"""A task's books: what is done, and what of it was written down."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from confluent_kafka import TopicPartition

from keylane.core.progress import LIMIT, encode
from keylane.core.record import Stop, encode_kept
from keylane.core.watermark import Progress, Watermark
from keylane.errors import FloodError, KafkaError
from keylane.kafka.cluster import TIMEOUT, Cluster
from keylane.kafka.state import ATTEMPTS, ELSEWHERE, MAX_PROGRESS, PROGRESS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from keylane.app import App
    from keylane.core.record import Kept
    from keylane.engine.engine import Engine
    from keylane.kafka.desk import Desk
    from keylane.kafka.fetcher import Fetcher
    from keylane.kafka.output import KafkaOutput
    from keylane.kafka.settings import KafkaSettings
    from keylane.kafka.state import State

log = logging.getLogger("keylane.task")

_STATE_RATE = 100_000.0
"""Characters of progress per second and partition that go to the state topic, about."""


class Books:
    """Restored once, opened with what it needs to write, then written now and then. Used on the loop's thread."""

    def __init__(self, app: App, settings: KafkaSettings) -> None:
        self.watermarks: dict[int, Watermark] = {}
        self._app = app
        self._settings = settings
        self._committed: dict[int, Progress] = {}
        self._attempts: dict[int, dict[int, Kept]] = {}  # as they were written down last
        self._not_before: dict[int, float] = {}  # when a partition's large progress is written next
        self._engine: Engine
        self._fetcher: Fetcher
        self._output: KafkaOutput
        self._desk: Desk

    def restore(self, state: State, starts: Mapping[int, int]) -> dict[int, int]:
        """Where each partition's reading begins: the group's progress, or ``starts``. Blocks.

        Raises FloodError when this run was stopped by its flood guard.
        """
        app = self._app
        state.restore()
        if state.flooded:
            raise FloodError(state.flooded)
        found = Cluster(self._settings).committed(app.name, app.source, starts)
        begins = {}
        for partition, fallback in starts.items():
            offset, metadata = found.get(partition, (fallback, None))
            restored = state.progress(partition, offset, metadata)
            if restored.problem:
                log.warning(
                    "%s/%d: %s; messages after %d run again", app.source, partition, restored.problem, offset
                )
            self.watermarks[partition] = Watermark(restored.progress)
            if partition in found:
                self._committed[partition] = restored.progress
            begins[partition] = restored.progress.watermark
        return begins

    def restore_lanes(self, state: State, engine: Engine, output: KafkaOutput) -> None:
        """Attempts, stopped lanes and standing orders, as they were written down."""
        kept = {
            (partition, offset): one
            for partition, found in state.attempts.items()
            for offset, one in found.items()
        }
        self._attempts = dict(state.attempts)
        lanes = []
        for (partition, name), record in state.lanes.items():
            if record.stop is Stop.PARKED or self.watermarks[partition].wanted(record.offset):
                lanes.append(record)
            else:  # its message was done, or the group was moved past it
                output.note(partition, name, None, lambda _problem: None)
        redrives = [order.key for order in state.orders.values() if order.do == "redrive"]
        engine.restore(kept, lanes, [key for key in redrives if key is not None])

    def open(self, engine: Engine, fetcher: Fetcher, output: KafkaOutput, desk: Desk) -> None:
        """Whom to ask, and through whom to write."""
        self._engine, self._fetcher, self._output, self._desk = engine, fetcher, output, desk

    async def write(self, *, final: bool = False) -> None:
        """Write down how far the task is, where that has changed. Raises KafkaError when it was not taken.

        What does not fit beside an offset goes to the state topic first; only then the offset says so. A large record
        is not written every time, but at the end (``final``): behind a stuck lane there are megabytes of them.
        """
        await self._write_attempts()
        await self._desk.write_down()
        changed = {}
        offsets = []
        for partition, mark in self.watermarks.items():
            progress = mark.progress()
            if progress == self._committed.get(partition):
                continue
            metadata = encode(progress, MAX_PROGRESS)
            if len(metadata) > LIMIT:
                if not final and time.monotonic() < self._not_before.get(partition, 0.0):
                    continue
                self._not_before[partition] = time.monotonic() + len(metadata) / _STATE_RATE
                await self._output.state(partition, PROGRESS, f"{progress.watermark} {metadata}".encode())
                metadata = ELSEWHERE
            changed[partition] = progress
            offsets.append(TopicPartition(self._app.source, partition, progress.watermark, metadata=metadata))
        if not offsets:
            return
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._fetcher.commit(offsets)), TIMEOUT)
        except TimeoutError:
            raise KafkaError(f"progress was not committed within {TIMEOUT:g} s") from None
        self._committed.update(changed)
        self._engine.stops.committed(self._is_committed)

    async def _write_attempts(self) -> None:
        kept = self._engine.course.kept()
        for partition in kept.keys() | self._attempts.keys():
            now = kept.get(partition, {})
            if now != self._attempts.get(partition, {}):
                value = encode_kept(now, MAX_PROGRESS) if now else None
                await self._output.state(partition, ATTEMPTS, value)
                self._attempts[partition] = now

    def _is_committed(self, partition: int, offset: int) -> bool:
        found = self._committed.get(partition)
        return found is not None and found.is_done(offset)
