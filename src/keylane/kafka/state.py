"""The app's state topic: what must outlive a task, and orders to running tasks.

``<app>.state`` is compacted and has as many partitions as the source: what concerns source partition *p* lies in state
partition *p*, whatever its key. A task reads its partitions to their end when it starts and follows them while it runs,
so an order is seen wherever a task runs and whenever it began.

=======================  ==================================================================
key                      value
=======================  ==================================================================
``progress``             the text of :mod:`keylane.core.progress`, with its watermark before it
``epoch``                progress that waits for Spark to commit the epoch: :class:`Proposal`
``range/<slots>``        progress of a range, where the partition is shared out: :mod:`keylane.core.standing`
``grouped``              ``[run, epoch]``: the offset that somebody had moved the group to was replaced by the app's
``attempts``             of messages that failed and are not done: :mod:`keylane.core.record`
``version/<key>``        how far an entity is, for apps with versions: :class:`keylane.core.versions.Mark`
``lane/<key>``           a lane that is blocked or parked (``keyless/<offset>`` for a message without a key)
``redriven``             which letters of this partition's dead letters were redriven: :mod:`keylane.core.ranges`
``run``                  ``{"run": …}``: the run that the app belongs to; another one ends
``load``                 ``[run, epoch, counts]``: what a task saw, by bucket of :mod:`keylane.core.plan`
``plan``                 in partition 0, the plan of the epoch that runs: ``{"run", "epoch", "at", "tasks"}``
``order/plan``           ``{"run": …, "number": …, "tasks": …}``: epochs that were planned before it end now
``owner/<id>``           the task with this transactional id owns slots of the partition: :mod:`keylane.kafka.claims`
``order/stop``           ``{"run": …}``: the tasks of this run drain and end
``order/flood``          ``{"run": …, "why": …}``: most messages failed; this run is not to be tried again
``order/lane/<key>``     what an operator wants done: :mod:`keylane.kafka.orders` (also ``order/redrive/…``)
``audit/<id>``           who ordered what, and when; ``audit/<id>/done`` what came of it
``rest``                 ``{"run": …, "until": …}``: everything up to there is done, but what stands in stopped lanes
=======================  ==================================================================

Where a partition is shared out, ``attempts``, ``redriven``, ``load`` and ``rest`` are each owner's own:
``attempts/<slots>``.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confluent_kafka import TopicPartition

from keylane.core.progress import decode
from keylane.core.ranges import Ranges
from keylane.core.record import KEYLESS, LANE, decode_kept, decode_lane
from keylane.core.ring import ALL, Slots
from keylane.core.standing import Standing
from keylane.core.versions import decode_mark
from keylane.engine.versionstore import VersionStore
from keylane.errors import KafkaError
from keylane.kafka.cluster import TIMEOUT, introduce
from keylane.kafka.orders import AUDIT, ORDER, Order, decode_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from confluent_kafka import Consumer

    from keylane.core.plan import Load
    from keylane.core.progress import Restored
    from keylane.core.record import Kept, LaneRecord
    from keylane.kafka.settings import KafkaSettings

log = logging.getLogger("keylane.kafka")

STOP = b"order/stop"
FLOOD = b"order/flood"
PROGRESS = b"progress"
ATTEMPTS = b"attempts"
REDRIVEN = b"redriven"
REST = b"rest"
RANGE = b"range/"
GROUPED = b"grouped"
LOAD = b"load"
PLAN = b"plan"
REPLAN = b"order/plan"
RUN = b"run"
EPOCH = b"epoch"
VERSION = b"version/"
OWNER = b"owner/"
MAX_PROGRESS = 900_000
"""Characters of progress in one record, below a topic's usual limit of 1 MiB."""
ELSEWHERE = "kl1:@"
"""The metadata of an offset whose progress lies in the state topic."""
NOTHING = "kl1:-"
"""The metadata of an offset that nothing is done above. Not empty: that is what others write who move a group."""
RANGES = "kl1:/"
"""The metadata of an offset whose partition is shared out: the progress of each range lies in the state topic."""
_WAIT = 20
"""Milliseconds that the broker waits before it says that there is nothing more: a restore takes at least so long."""
_WAIT_NOW_AND_THEN = 1
"""For who rests in between."""
_HIDDEN = 1.0
"""Seconds for which what lies behind an open transaction is waited for: one that is just committed ends at once."""
_POLL = 1000
_POLLS = 20
"""Records that are read at once, and how often, before the loop has its turn: versions come by the thousand."""


def order_stop(
    settings: KafkaSettings, topic: str, partitions: int, run: str, timeout: float = TIMEOUT
) -> None:
    """Tell the tasks of this run to drain and end. Raises KafkaError when the order could not be written."""
    _order(settings, topic, partitions, STOP, {"run": run}, timeout)


def order_plan(
    settings: KafkaSettings, topic: str, partitions: int, run: str, *, number: int, tasks: int
) -> None:
    """Tell the tasks of this run that there may be so many of them from now on.

    An epoch that was planned before the order of this ``number`` drains and ends: all of it, also when a later order
    wants what there was. Raises KafkaError when the order could not be written.
    """
    wanted = {"run": run, "number": number, "tasks": tasks}
    _order(settings, topic, partitions, REPLAN, wanted, TIMEOUT)


def _order(
    settings: KafkaSettings, topic: str, partitions: int, name: bytes, value: dict[str, Any], timeout: float
) -> None:
    producer = settings.producer(**{"message.timeout.ms": int(timeout * 1000)})
    failed: list[str] = []
    for partition in range(partitions):
        producer.produce(
            topic,
            json.dumps(value).encode(),
            name,
            partition=partition,
            on_delivery=lambda error, _: failed.append(error.str()) if error else None,
        )
    left = producer.flush(timeout)
    if left or failed:
        raise KafkaError(
            f"an order could not be written to topic {topic!r}: {failed[0] if failed else 'no answer'}"
        )


@dataclass(frozen=True, slots=True)
class Proposal:
    """For ``commit="epoch"``: how far a task came in the epoch. It counts when Spark has committed that."""

    epoch: int
    watermark: int
    text: str
    """Of :mod:`keylane.core.progress`."""
    redriven: str

    def encode(self) -> bytes:
        """For the state topic."""
        return json.dumps([self.epoch, self.watermark, self.text, self.redriven]).encode()


@dataclass(frozen=True, slots=True)
class Claim:
    """A task says that it owns slots of a partition."""

    place: int
    """Where it lies in the state topic: of two claims the later one counts."""
    slots: Slots
    run: str
    who: str
    leaving: bool
    """It finishes what it has begun, and then lets go."""
    heard: float
    """When this was read, by the monotonic clock."""


def _consumer(settings: KafkaSettings, app: str, wait: int) -> Consumer:
    few = {"queued.min.messages": 1000, "queued.max.messages.kbytes": 16_384, "fetch.wait.max.ms": wait}
    consumer = settings.consumer(f"{app}.state", **few, **{"isolation.level": "read_committed"})
    introduce(consumer, f"{app}.state")
    return consumer


class State:
    """One task's view of the state topic. After :meth:`restore`, :meth:`poll` never blocks.

    Used by one thread at a time: the one that restores, then the loop's. ``rests``: by who looks now and then, with
    :meth:`catch_up` and :meth:`rest`.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        app: str,
        topic: str,
        partitions: Iterable[int],
        run: str,
        consumer: Consumer | None = None,
        versions: VersionStore | None = None,
        since: Mapping[int, int] | None = None,
        *,
        rests: bool = False,
    ) -> None:
        self.versions = versions
        """Where the versions of entities go, as long as somebody wants to know: they may be very many."""
        self._versions_only = False
        self._settings = settings
        self._app = app
        self.topic = topic
        self._partitions = list(partitions)
        self._run = run
        self._since = since or {}
        self._consumer = consumer or _consumer(settings, app, _WAIT_NOW_AND_THEN if rests else _WAIT)
        self._next: dict[int, int] = dict.fromkeys(self._partitions, 0)
        self._progress: dict[int, str] = {}
        self._fresh: list[Order] = []
        self.stopped = False
        self.flooded = ""  # why the run was stopped
        self.runs: dict[int, dict[str, Any]] = {}  # whom the app belongs to, by partition
        self.owners: dict[int, dict[str, Claim]] = {}  # by partition and transactional id
        self.proposals: dict[int, Proposal] = {}
        self.standings: dict[int, dict[Slots, Standing]] = {}  # by partition
        self.grouped: dict[int, Any] = {}
        self.loads: dict[
            int, dict[Slots, tuple[int, Load]]
        ] = {}  # of this run: epoch and counts, by partition
        self.plan: dict[str, Any] = {}
        self.wanted: dict[str, Any] = {}  # of this run: how many tasks there should be
        self.attempts: dict[int, dict[bytes, dict[int, Kept]]] = {}  # by partition and record
        self.lanes: dict[tuple[int, bytes], LaneRecord] = {}
        self.redriven: dict[int, Ranges] = {}
        self.orders: dict[tuple[int, bytes], Order] = {}  # that nobody has answered
        self.audits: dict[bytes, tuple[int, bytes]] = {}  # name: partition and value
        self.rests: dict[int, dict[Slots, int]] = {}  # of this run: up to where all but stopped lanes is done

    def restore(self) -> None:
        """Read everything there is. Raises KafkaError when it cannot be read."""
        # A number, not OFFSET_BEGINNING: the client would take three quarters of a second to find out what that is. A
        # topic that is only compacted begins at 0 for ever; one that does not is read from its beginning all the same.
        self._consumer.assign([TopicPartition(self.topic, p, 0) for p in self._partitions])
        self._read_to_the_end()

    def restore_versions(self) -> None:
        """Read the versions once more, into a new store; everything else is known. Raises KafkaError."""
        self.versions = VersionStore()
        self._versions_only = True
        try:
            self._consumer.assign([TopicPartition(self.topic, p, 0) for p in self._partitions])
            self._read_to_the_end()
        finally:
            self._versions_only = False

    def _read_to_the_end(self) -> None:
        left = set(self._partitions)
        heard = time.monotonic()
        while left:
            for message in self._batch(0.05):
                heard = time.monotonic()
                if self._read(message):
                    left.discard(message.partition())
            if time.monotonic() - heard > 3 * TIMEOUT:
                raise KafkaError(
                    f"topic {self.topic!r} gives no answer; its partitions {sorted(left)} were not read to the end"
                )

    def rest(self) -> None:
        """Fetch nothing until the next :meth:`catch_up`: for who looks only now and then."""
        self._consumer.unassign()

    def catch_up(self, ends: Mapping[int, int]) -> None:
        """Read what has come since the last :meth:`rest`, up to these ends. Raises KafkaError when it cannot be read.

        What was committed a moment ago may still be hidden, for a few milliseconds; what lies behind the open
        transaction of a task that died is not waited for.
        """
        self._consumer.assign([TopicPartition(self.topic, p, at) for p, at in self._next.items()])
        if not self.read_through({p: end - 1 for p, end in ends.items()}, _HIDDEN):
            self._consumer.assign([TopicPartition(self.topic, p, at) for p, at in self._next.items()])
            self._read_to_the_end()

    def read_through(self, places: Mapping[int, int], timeout: float) -> bool:
        """Read on until these places, by partition, were read; whether that was so within the time."""
        deadline = time.monotonic() + timeout
        while any(self._next.get(p, place + 1) <= place for p, place in places.items()):
            if time.monotonic() > deadline:
                return False
            for message in self._batch(0.02):
                self._read(message)
        return True

    def of(
        self,
        partitions: Iterable[int],
        run: str,
        versions: VersionStore | None = None,
        since: Mapping[int, int] | None = None,
    ) -> State:
        """A view of other partitions, or for another run, through the same client; this one is of no use any more."""
        return State(self._settings, self._app, self.topic, partitions, run, self._consumer, versions, since)

    def _batch(self, timeout: float) -> list[Any]:
        # One at a time while there is nothing: consume() waits out its time-out for the rest.
        message = self._consumer.poll(timeout)
        return [] if message is None else [message, *self._consumer.consume(1000, 0)]

    def _read(self, message: Any) -> bool:
        """Take a record; whether it was the partition's end instead."""
        error = message.error()
        if error is None:
            self._take(message)
        elif error.code() == error._PARTITION_EOF:  # noqa: SLF001 - the client's public constant
            self._next[message.partition()] = message.offset()
            return True
        elif error.fatal() or not error.retriable():
            raise KafkaError(f"topic {self.topic!r} cannot be read: {error.str()}")
        return False

    def progress(self, partition: int, watermark: int, metadata: str | None) -> Restored:
        """Progress from a committed offset: its metadata, or what lies in the topic when it says so."""
        if metadata in (NOTHING, RANGES):
            return decode(watermark, None)
        if metadata != ELSEWHERE:
            return decode(watermark, metadata)
        begins, _, text = self._progress.get(partition, "").partition(" ")
        # The record is written before the offset that names it, so it may be newer; what it says is done, is done.
        if begins.isdigit() and int(begins) >= watermark:
            return decode(int(begins), text)
        return decode(watermark, "kl1:the record in the state topic is missing or older")

    def poll(self) -> bool:
        """Read what is there; whether this run was told to stop."""
        for _ in range(_POLLS):
            messages: list[Any] = self._consumer.consume(_POLL, 0)
            for message in messages:
                error = message.error()
                if error is None:
                    self._take(message)
                elif error.code() == error._PARTITION_EOF:  # noqa: SLF001 - the client's public constant
                    self._next[message.partition()] = message.offset()
            if len(messages) < _POLL:
                break
        return self.stopped

    def has_read(self, ends: Mapping[int, int]) -> bool:
        """Whether everything below these offsets was read."""
        return all(self._next[p] >= end for p, end in ends.items())

    def begin_again(self) -> None:
        """For the next epoch: what is still ordered is handed out anew."""
        self._fresh = list(self.orders.values())

    @property
    def successor(self) -> dict[str, Any] | None:
        """Another run that the app belongs to, if it does.

        One from before this run is none: that is all there is to see while a transaction of its dead tasks is open.
        """
        for partition, found in self.runs.items():
            if found["run"] != self._run and found["place"] > self._since.get(partition, -1):
                return found
        return None

    def take_orders(self) -> list[Order]:
        """Orders that have come in since the last call."""
        fresh, self._fresh = self._fresh, []
        return [order for order in fresh if self.orders.get((order.partition, order.name)) == order]

    def close(self) -> None:
        """Let go of the consumer."""
        self._consumer.close()

    def _take(self, message: Any) -> None:
        name, value, partition = message.key() or b"", message.value(), message.partition()
        self._next[partition] = message.offset() + 1
        if (self.versions is None and name.startswith(VERSION)) or (
            self._versions_only and not name.startswith(VERSION)
        ):
            return
        try:
            if value is None:
                self._take_back(partition, name)
            elif name.startswith(OWNER):
                self._take_claim(partition, name.removeprefix(OWNER).decode(), message.offset(), value)
            elif name == RUN:
                self.runs[partition] = json.loads(value) | {"place": message.offset()}
            else:
                self._put(partition, name, value)
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            log.warning(
                "%s/%d@%d makes no sense (%s): %r %r",
                self.topic,
                partition,
                message.offset(),
                error,
                name,
                value,
            )

    def _take_claim(self, partition: int, owner: str, place: int, value: bytes) -> None:
        claims = self.owners.setdefault(partition, {})
        if owner in claims:  # it says that it is leaving; its place stays
            place = claims[owner].place
        found = json.loads(value)
        leaving = bool(found.get("leaving"))
        slots = Slots.parse(found["slots"]) if "slots" in found else ALL
        claims[owner] = Claim(place, slots, found["run"], found["who"], leaving, time.monotonic())

    def _put(self, partition: int, name: bytes, value: bytes) -> None:
        if name.startswith(VERSION):
            if self.versions is not None:
                self.versions.put((partition, name.removeprefix(VERSION)), *decode_mark(value))
        elif name == PROGRESS:
            self._progress[partition] = value.decode("ascii")
        elif name.startswith(RANGE):
            standing = Standing.decode(name.removeprefix(RANGE).decode(), value)
            self.standings.setdefault(partition, {})[standing.slots] = standing
        elif _is_part(name, LOAD):
            run, epoch, counts = json.loads(value)
            if run == self._run:
                self.loads.setdefault(partition, {})[_part(name, LOAD)] = (
                    int(epoch),
                    tuple(map(float, counts)),
                )
        elif name == PLAN:
            self.plan = json.loads(value)
        elif name == REPLAN:
            found = json.loads(value)
            if found["run"] == self._run:
                self.wanted = found
        elif name == GROUPED:
            self.grouped[partition] = json.loads(value)
        elif _is_part(name, ATTEMPTS):
            self.attempts.setdefault(partition, {})[name] = decode_kept(value)
        elif _is_part(name, REDRIVEN):  # a letter that was redriven stays so, whoever wrote it down
            found = Ranges.decode(value)
            self.redriven[partition] = self.redriven.get(partition, Ranges()).union(found)
        elif name.startswith((LANE, KEYLESS)):
            self.lanes[partition, name] = decode_lane(name, partition, value)
        elif name == EPOCH:
            self.proposals[partition] = Proposal(*json.loads(value))
        elif name == STOP:
            self.stopped = self.stopped or json.loads(value)["run"] == self._run
        elif name == FLOOD:
            found = json.loads(value)
            if found["run"] == self._run:
                self.flooded = str(found["why"])
        elif _is_part(name, REST):
            found = json.loads(value)
            if found["run"] == self._run:
                self.rests.setdefault(partition, {})[_part(name, REST)] = int(found["until"])
        elif name.startswith(ORDER):
            order = decode_order(name, partition, value)
            self.orders[partition, name] = order
            self._fresh.append(order)
        elif name.startswith(AUDIT):
            self.audits[name] = partition, value

    def _take_back(self, partition: int, name: bytes) -> None:
        if name.startswith(OWNER):
            self.owners.get(partition, {}).pop(name.removeprefix(OWNER).decode(), None)
        self.lanes.pop((partition, name), None)
        self.orders.pop((partition, name), None)
        if name.startswith(RANGE):
            self.standings.get(partition, {}).pop(Slots.parse(name.removeprefix(RANGE).decode()), None)
        if _is_part(name, ATTEMPTS):
            self.attempts.get(partition, {}).pop(name, None)


def part_of(name: bytes, slots: Slots) -> bytes:
    """The name of the record that the owner of these slots writes."""
    return name if slots == ALL else name + b"/" + str(slots).encode()


def _is_part(name: bytes, record: bytes) -> bool:
    return name == record or name.startswith(record + b"/")


def _part(name: bytes, record: bytes) -> Slots:
    return ALL if name == record else Slots.parse(name.removeprefix(record + b"/").decode())
