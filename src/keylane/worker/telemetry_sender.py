"""Writes a task's telemetry, and never disturbs its work: records that cannot be sent are dropped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from keylane.engine.latency_sampler import LatencySampler
from keylane.errors import KeylaneError
from keylane.kafka.client import KafkaException
from keylane.lanes.lane_record import LaneStatus
from keylane.safe_text import cut_bytes
from keylane.telemetry.lane_wall import LANES_MAX, pack
from keylane.telemetry.snapshot import HotFigures, LaneFigures, PartitionFigures, Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.engine.delivery import Delivery
    from keylane.engine.engine import Engine
    from keylane.engine.stages import Step
    from keylane.kafka.client import Producer
    from keylane.kafka.fetcher import Fetcher
    from keylane.kafka.settings import KafkaSettings
    from keylane.lanes.lane_table import LaneState
    from keylane.outcome import Outcome
    from keylane.spec import AppSpec
    from keylane.state.topic import StateTopic
    from keylane.worker.progress import ProgressTracker
    from keylane.worker.task_plan import TaskPlan

log = logging.getLogger("keylane.telemetry")

_RECORD_EXPIRES_SECONDS = 5.0
"""Age at which a record is not worth sending any more."""
_HOT_KEYS_INTERVAL_SECONDS = 5.0
"""Time between two counts of the hot keys' backlogs."""
_LANES_AT_ONCE = 250
"""Lanes that are packed before the loop gets its turn."""
_WALL_INTERVAL_SECONDS = 1.0
_KEY_BYTES_MAX = 200
_HOLDS_MAX = 100
"""Rates and pauses that a record names, at most."""
"""Bytes of a hot key that a record contains."""


class TelemetrySender:
    """Sends records with a client of its own, which is kept from epoch to epoch. Never raises, never waits."""

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        self.dropped = 0
        self._topic = topic
        self._said = False
        self._producer: Producer | None = None
        try:
            self._producer = settings.producer(
                **{
                    "enable.idempotence": False,
                    "acks": 1,
                    "linger.ms": 0,
                    "message.timeout.ms": int(_RECORD_EXPIRES_SECONDS * 1000),
                    "queue.buffering.max.messages": 64,
                    "queue.buffering.max.kbytes": 16_384,
                }
            )
        except KeylaneError as error:
            self._drop(error)

    def send(self, key: bytes, value: bytes) -> None:
        """Hand over a record, or drop it."""
        if self._producer is None:
            self.dropped += 1
            return
        try:
            self._producer.poll(0)
            self._producer.produce(self._topic, value, key, on_delivery=self._report)
        except (KafkaException, BufferError) as error:
            self._drop(error)

    def serve(self) -> None:
        """Serve the delivery reports."""
        if self._producer is not None:
            self._producer.poll(0)

    def close(self) -> None:
        """Drop the records in flight, and close."""
        if self._producer is not None:
            with contextlib.suppress(KafkaException):
                self._producer.purge()
            self._producer = None

    def _report(self, error: Any, _message: Any) -> None:
        if error is not None:
            self._drop(error)

    def _drop(self, why: object) -> None:
        self.dropped += 1
        if not self._said:
            self._said = True
            log.warning(
                "dropping telemetry: topic %r does not take it (%s). Messages are processed as usual. Logged once",
                self._topic,
                why,
            )


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counters of the engine and the sender, at one moment."""

    done: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    retries: int = 0
    dropped: int = 0


class TelemetryWriter:
    """Telemetry of one worker. Its counters begin with every epoch.

    Used on the worker's loop; :meth:`run`, :meth:`begin_epoch` and :meth:`last` raise nothing of their own.
    """

    def __init__(self, app: AppSpec, plan: TaskPlan, owner: str, *, interval: float) -> None:
        self._app = app
        self._owner = owner
        self._interval = interval
        self._hot: tuple[HotFigures, ...] = ()
        self._hot_after = 0.0
        self._wall, self._wall_after = "", 0.0
        self._before = _Counts()  # when the epoch began
        self._start_counting(plan)
        self._done, self._progressed = 0, self._began
        self._moved: dict[
            int, tuple[int, float]
        ] = {}  # the watermark, and when it was first seen with that value
        self._sender: TelemetrySender
        self._engine: Engine
        self._steps: Sequence[Step]
        self._progress: ProgressTracker
        self._fetcher: Fetcher
        self._state: StateTopic

    def open(
        self,
        sender: TelemetrySender,
        engine: Engine,
        steps: Sequence[Step],
        progress_tracker: ProgressTracker,
        fetcher: Fetcher,
        state: StateTopic,
    ) -> None:
        """Connect it to the engine and the clients."""
        self._state = state
        self._sender, self._engine, self._steps = sender, engine, steps
        self._progress, self._fetcher = progress_tracker, fetcher
        self._before = _Counts(dropped=sender.dropped)

    def _start_counting(self, plan: TaskPlan) -> None:
        self._plan = plan
        self._life = uuid.uuid4().hex[:16]
        self._began = time.time()
        self._meter = LatencySampler()

    def done(self, deliveries: list[Delivery]) -> None:
        """These are done."""
        self._meter.done(deliveries)

    def begin_epoch(self, plan: TaskPlan) -> None:
        """The next Spark task has attached: report the last figures of the epoch before, and count from 0."""
        self._send_snapshot(final=True)
        figures = self._engine.statistics()
        self._before = _Counts(figures.done, figures.outcomes, figures.retries, self._sender.dropped)
        self._start_counting(plan)

    async def run(self) -> None:
        """Send a record every interval, until cancelled."""
        due = time.monotonic() + self._interval
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due = max(due + self._interval, time.monotonic())
            if self._state.watched_until > time.time() and time.monotonic() >= self._wall_after:
                self._wall_after = time.monotonic() + _WALL_INTERVAL_SECONDS
                self._wall = await self._pack_lanes()
            if not self._send_snapshot():
                return
            self._meter.tick()

    def last(self) -> None:
        """Send the epoch's last record."""
        self._send_snapshot(final=True)
        self._sender.serve()

    def snapshot(self, *, final: bool = False) -> Snapshot:
        """The task's figures now."""
        figures, plan, engine = self._engine.statistics(), self._plan, self._engine
        now, before = time.time(), self._before
        if figures.done != self._done:
            self._done, self._progressed = figures.done, now
        if time.monotonic() >= self._hot_after:
            self._hot_after = time.monotonic() + _HOT_KEYS_INTERVAL_SECONDS
            self._hot = tuple(
                HotFigures(
                    key=cut_bytes(hot.key, _KEY_BYTES_MAX),
                    partition=hot.partition,
                    share=round(hot.share, 4),
                    waiting=hot.waiting,
                )
                for hot in engine.skew.hot()
            )
        stops = [record.stop for record in engine.stopped_lanes.records.values()]
        return Snapshot(
            app=self._app.name,
            source=self._app.source,
            run=plan.run,
            shard=str(plan.shard),
            epoch=plan.epoch,
            task=plan.task,
            plan=plan.replan,
            order=self._app.order.name,
            owner=self._owner,
            life=self._life,
            began=round(self._began, 3),
            at=round(now, 3),
            interval=self._interval,
            final=final,
            progressed=round(self._progressed, 3),
            done=figures.done - before.done,
            outcomes=figures.outcomes - before.outcomes,
            retries=figures.retries - before.retries,
            dropped=self._sender.dropped - before.dropped,
            lanes=LaneFigures(
                all=figures.lanes.lanes,
                ready=figures.lanes.ready,
                running=figures.lanes.running,
                retrying=figures.lanes.retrying,
                waiting=figures.lanes.waiting,
                blocked=stops.count(LaneStatus.BLOCKED),
                parked=stops.count(LaneStatus.PARKED),
            ),
            held=figures.held,
            early=figures.early,
            capacity=self._fetcher.room,
            partitions={
                p: self._partition(p, now) for p in self._progress.watermarks if p in self._fetcher.flows
            },
            breakers={s.name: s.gate.circuit.state.value for s in self._steps if s.gate is not None},
            holds=dict(islice(engine.holds().items(), _HOLDS_MAX)),
            latency=self._meter.latency,
            processing=self._meter.processing,
            hot=self._hot,
            wall=self._wall,
        )

    async def _pack_lanes(self) -> str:
        """Pack all lanes, a few at a time: the loop has other work."""
        found: list[tuple[int, LaneState]] = []
        lanes = list(self._engine.table.lanes.values())[:LANES_MAX]
        for begin in range(0, len(lanes), _LANES_AT_ONCE):
            for lane in lanes[begin : begin + _LANES_AT_ONCE]:
                one = lane.tail
                found.append((self._app.slot_of(one.key, one.offset), lane.state))
            await asyncio.sleep(0)
        return pack(found)

    def _partition(self, partition: int, now: float) -> PartitionFigures:
        mark, flow = self._progress.watermarks[partition], self._fetcher.flows[partition]
        before, moved = self._moved.get(partition, (mark.value, self._began))
        if mark.value != before:
            moved = now
        self._moved[partition] = mark.value, moved
        return PartitionFigures(
            watermark=mark.value,
            position=mark.position,
            end=max(flow.end, mark.position),
            held=flow.buffered,
            away=flow.evicted,
            paused=bool(flow.paused_at),
            moved=round(moved, 3),
        )

    def _send_snapshot(self, *, final: bool = False) -> bool:
        try:
            self._sender.send(str(self._plan.task).encode(), self.snapshot(final=final).encode())
            self._wall = ""
        except Exception:  # wrong figures must not disturb the work
            log.exception("%s: telemetry stops, because its figures could not be collected", self._owner)
            return False
        return True
