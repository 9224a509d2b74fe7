"""The task's output: results to the sink, records to the state topic."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Literal

from keylane.denial import broker_error, is_denied
from keylane.engine.output import SentAloneError
from keylane.engine.result_ids import RESULT_ID_BYTES_MAX, result_headers, result_id_prefix
from keylane.engine.results import only_row
from keylane.errors import BrokerError, Poison
from keylane.kafka.client import KafkaException
from keylane.kafka.rejection import RECORD_OVERHEAD_BYTES, Rejections, is_rejection
from keylane.message import EVENT_ID, with_origin
from keylane.rights import Operation, on_topic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.dlq.writer import DeadLetterWriter
    from keylane.engine.delivery import Delivery
    from keylane.engine.engine import Engine
    from keylane.engine.output import Then
    from keylane.engine.results import ResultRecord
    from keylane.kafka.client import Producer
    from keylane.kafka.rejection import TopicRules
    from keylane.message import Headers
    from keylane.policies.failure_info import FailureInfo
    from keylane.spec import AppSpec
    from keylane.worker.session import WorkerSession

ANY_PARTITION = -1
LAST_REPORTS_SECONDS = 2.0
"""How long a task that ends waits for the acknowledgements of results in flight."""
BUSY_LOOP_LANES = 64
"""Ready lanes. When more of them wait, the event loop is the bottleneck."""
_GATHER_SECONDS_MAX = 0.05
"""How long results are gathered while the loop is the bottleneck, in addition to the client's own linger."""
_REVIEW_INTERVAL_SECONDS = 0.2
_NO_LIMIT_MS = 1 << 61
CLOCKS_APART_MS = 60_000
"""A result whose time exceeds the sink's limit by less than this is sent, and the broker decides."""


class _AllAcknowledged:
    """The delivery report of several results of one message: acknowledges it when all of them are durable.

    They may be in several partitions and topics, so later ones may be durable although an earlier one failed.
    """

    __slots__ = ("_delivery", "_failed", "_left")

    def __init__(self, delivery: Delivery, count: int) -> None:
        self._delivery = delivery
        self._left = count
        self._failed = False

    def __call__(self, error: Any, message: Any) -> None:
        self._left -= 1
        if error is not None:
            self._failed = True
            self._delivery(error, message)
        elif not self._left and not self._failed:
            self._delivery(None, message)


class _Rejected:
    """The delivery report of a result in a transaction that is a batch of its own."""

    __slots__ = ("_position", "_rejections", "_sink")

    def __init__(self, delivery: Delivery, rejections: Rejections, sink: str) -> None:
        self._position = delivery.partition, delivery.offset
        self._rejections = rejections
        self._sink = sink

    def __call__(self, error: Any, _message: Any) -> None:
        if error is not None and is_rejection(error):
            self._rejections.set_reason(self._position, _why(self._sink, error))


@dataclass(frozen=True, slots=True, kw_only=True)
class _SinkTopic:
    """What one of the app's sinks takes."""

    limit: float
    """Bytes of key, value and headers together."""
    rules: TopicRules
    origin: bool
    """Whether its results carry the header ``origin-time``."""


class _Alone:
    """A message whose results are sent one at a time. Its lane waits."""

    __slots__ = ("delivery", "records")

    def __init__(self, delivery: Delivery, records: Sequence[tuple[Any, ...]]) -> None:
        self.delivery = delivery
        self.records = deque(records)


class KafkaOutput:
    """An :class:`~keylane.engine.engine.Output`. Results keep the key, headers and timestamp of their message.

    ``stamps``: the sink gives records a timestamp of its own, so the original time goes into a header.

    With ``delivery="at_least_once"`` results go through the session's idempotent producer, whose delivery reports call
    the deliveries, and records go into the next transaction of the transactional writer. With ``"exactly_once"``
    everything goes into the open transaction and counts at once, because whatever follows is in it too or in a later
    one. If it is aborted, the task begins again from the last commit.

    A request contains results of one partition, and costs the broker much more than one more result in it. So while
    lanes queue for the loop, and while the task is far behind, results are gathered for up to 50 ms: those messages
    have waited longer than that already, and the lanes continue meanwhile.

    A result that the sink rejects fails as if its message's last stage had raised Poison. The limits in the topic's
    settings are checked before sending. For any other rejection the client writes nothing more
    (``enable.gapless.guarantee``), and the task begins again. It then sends the results of the rejected batch alone:
    each when everything before it in its lane is durable, while its lane waits for the answer (``rejections``).

    Used on the loop's thread only; :meth:`poll` serves the reports.
    """

    def __init__(
        self,
        worker_session: WorkerSession,
        dead_letters: DeadLetterWriter,
        app: AppSpec,
        *,
        limit: int,
        stamps: bool = False,
        rejections: Rejections | None = None,
    ) -> None:
        self._worker_session = worker_session
        self._dead_letters = dead_letters
        self._writer = worker_session.writer
        self._exact = app.delivery == "exactly_once"
        self._producer = None if self._exact else worker_session.producer("results")
        self._app = app
        self._sink = app.sink or ""
        self._prefix = result_id_prefix(app.name)
        self._short = RESULT_ID_BYTES_MAX - len(self._prefix)
        self._limit = limit - RECORD_OVERHEAD_BYTES
        # The client checks the size of records outside transactions, with their headers.
        self._unchecked = -1 if self._exact else self._limit - 1024
        self._rules = worker_session.rules(self._sink)
        self._topics = self._sink_topics(stamps=stamps)
        self._oldest, self._newest = _times(self._rules)  # timestamps between these need no check
        self._rejections = rejections or Rejections()
        self._alone: list[_Alone] = []  # waiting for the messages before them
        self._closed = False
        self._gathers = False
        self._direct = not self._is_careful()
        self._gathered: list[tuple[Any, ...]] = []  # arguments of the client's produce()
        self._first = 0.0  # when the oldest of them was gathered
        self._timer: asyncio.TimerHandle | None = None  # sends them
        self._loop = asyncio.get_running_loop()
        self._reviewed_at = time.monotonic()
        self._least = 0  # the least lanes that were waiting for the loop, at any review since
        self._origin = stamps if app.origin_time is None else app.origin_time

    def result(self, delivery: Delivery, value: bytes) -> None:
        """Send the result. Raises :class:`Poison` when the value is larger than the sink takes."""
        if not self._sink:  # it goes to Spark's sink with the outcome
            delivery.value = value
            delivery.engine.acknowledge(delivery)
            return
        headers = delivery.carried
        # The event id is almost always the last and short: the hot path of result_headers().
        if headers and (last := headers[-1])[0] == EVENT_ID and (own := last[1]) and len(own) < self._short:
            named = EVENT_ID, self._prefix + own
            headers = [named] if len(headers) == 1 else [*headers[:-1], named]
        else:
            headers = result_headers(delivery, self._prefix)
        if self._origin:
            headers = with_origin(delivery, headers)
        if len(value) > self._unchecked:
            self._check_size(self._sink, delivery.key, value, headers)
        stamp = delivery.timestamp or 0
        if not self._oldest <= stamp <= self._newest:
            self._check_time(self._sink, stamp)
        if self._producer is None:
            self._put(
                delivery, ((self._sink, value, delivery.key, ANY_PARTITION, None, None, stamp, headers),)
            )
            delivery.engine.acknowledge(delivery)
        else:
            # Positional (…, partition, callback, on_delivery, timestamp, headers), because this is the hot path.
            record = (self._sink, value, delivery.key, ANY_PARTITION, delivery, None, stamp, headers)
            if self._direct:
                self._give(self._producer, (record,), delivery.engine)
            else:
                self._defer(self._producer, delivery, (record,))

    def all_results(self, delivery: Delivery, records: Sequence[ResultRecord]) -> None:
        """Send all results of a message. Raises :class:`Poison` when a sink takes one of them never: none is sent."""
        if not self._sink:
            delivery.value = only_row(records, "commit='epoch'").value
            delivery.engine.acknowledge(delivery)
            return
        report: Any = delivery if len(records) == 1 else _AllAcknowledged(delivery, len(records))
        produced = []
        for record in records:
            topic, headers, stamp = record.topic, record.headers, record.timestamp or 0
            if self._topics[topic].origin:
                headers = with_origin(delivery, headers)
            self._check_size(topic, record.key, record.value, headers)
            self._check_time(topic, stamp)
            produced.append((topic, record.value, record.key, ANY_PARTITION, report, None, stamp, headers))
        if self._producer is None:
            self._put(delivery, produced)
            delivery.engine.acknowledge(delivery)
        elif self._direct:
            self._give(self._producer, produced, delivery.engine)
        else:
            self._defer(self._producer, delivery, produced)

    def _sink_topics(self, *, stamps: bool) -> dict[str, _SinkTopic]:
        """What each sink takes. The limit and ``stamps`` of the first one are those of the plan."""
        found = {}
        for topic in self._app.sinks:
            rules = self._worker_session.rules(topic)
            limit: float = rules.limit - RECORD_OVERHEAD_BYTES if rules.limit else inf
            if topic == self._sink:
                limit = self._limit
            replaced = stamps if topic == self._sink else rules.stamps
            origin = replaced if self._app.origin_time is None else self._app.origin_time
            found[topic] = _SinkTopic(limit=limit, rules=rules, origin=origin)
        return found

    def _check_size(self, topic: str, key: bytes | None, value: bytes | None, headers: Headers) -> None:
        limit = self._topics[topic].limit
        carried = sum(len(name) + len(content or b"") + 8 for name, content in headers)
        if len(value or b"") + len(key or b"") + carried > limit:
            raise Poison(
                f"the result of {len(value or b''):,} bytes is larger than topic {topic!r} takes "
                f"(max.message.bytes less overhead: {limit:,.0f})"
            )

    def _check_time(self, topic: str, stamp: int) -> None:
        """Raises :class:`Poison` when the sink takes no results of this time, allowing for clocks that differ."""
        rules = self._topics[topic].rules
        oldest, newest = _times(rules)
        if topic == self._sink:
            self._oldest, self._newest = oldest, newest
        for name, limit, over in (
            ("before", rules.max_age_ms, oldest - stamp),
            ("after", rules.max_ahead_ms, stamp - newest),
        ):
            if stamp and over > CLOCKS_APART_MS:
                raise Poison(
                    f"the result has the time {stamp / 1000:.0f} s since 1970, its own or its message's, which topic "
                    f"{topic!r} does not take (message.timestamp.{name}.max.ms: {limit:.0f})"
                )

    def _put(self, delivery: Delivery, produced: Sequence[tuple[Any, ...]]) -> None:
        """Put a message's results into the open transaction. Raises :class:`Poison` when one was rejected before."""
        rejections = self._rejections
        if rejections.alone:
            reason = rejections.reason(delivery.partition, delivery.offset)
            if reason is not None:
                raise Poison(reason)
        for topic, value, key, _, _, _, stamp, headers in produced:
            report = _Rejected(delivery, rejections, topic) if rejections.alone else None
            self._writer.put(topic, value, key, stamp, headers, report=report)

    def letter(
        self,
        delivery: Delivery,
        letter: FailureInfo | None,
        kind: Literal["dead", "archived", "parked"],
        park: int | None,
        then: Then,
    ) -> None:
        """Write a dead letter: see :class:`DeadLetterWriter`."""
        self._dead_letters.letter(delivery, letter, kind, park, then)

    def note(self, partition: int, name: bytes, value: bytes | None, then: Then) -> None:
        """Write a record of the state topic."""
        self._writer.put_state(partition, name, value, then)

    def _defer(self, producer: Producer, delivery: Delivery, records: Sequence[tuple[Any, ...]]) -> None:
        """Keep results that are not sent at once: they are gathered, or sent alone."""
        engine, rejections = delivery.engine, self._rejections
        if (delivery.partition, delivery.offset) in rejections.suspects or rejections.sends_alone(
            time.monotonic()
        ):
            self._alone.append(_Alone(delivery, records))
            self._loop.call_soon(self._serve_alone)  # first the engine must learn that its lane waits
            raise SentAloneError
        if not self._gathers:
            self._give(producer, records, engine)
            return
        gathered = self._gathered
        before = len(gathered)
        gathered += records
        if not before:
            self._first = time.monotonic()
            self._timer = self._loop.call_later(_GATHER_SECONDS_MAX, self._flush_gathered, producer, engine)
        # The timer comes late while handlers occupy the loop.
        elif len(gathered) // 32 > before // 32 and time.monotonic() - self._first > _GATHER_SECONDS_MAX:
            self._flush_gathered(producer, engine)

    def _is_careful(self) -> bool:
        return bool(self._rejections.suspects) or self._rejections.sends_alone(time.monotonic())

    def _serve_alone(self) -> None:
        """Send the results for which everything before them in their lanes is durable."""
        waiting, self._alone = self._alone, []
        for one in waiting:
            lane = one.delivery.lane
            if lane is not None and lane.first is one.delivery:
                self._send_alone(one)
            else:
                self._alone.append(one)

    def _send_alone(self, one: _Alone) -> None:
        """Send the first of its results; the next one follows when this one is durable."""
        if self._closed:
            return

        def report(error: Any, _message: Any) -> None:
            if self._closed:  # the loop may be closed too
                return
            if error is None:
                one.records.popleft()
                if one.records:
                    self._send_alone(one)
                else:
                    self._answered(one, None)
            elif is_rejection(error):
                self._answered(one, _why(topic, error))
            else:
                one.delivery.engine.refused(one.delivery, error)

        topic, value, key, partition, _, _, stamp, headers = one.records[0]
        produce: Any = self._worker_session.producer("alone").produce
        try:
            produce(topic, value, key, partition, report, None, stamp, headers)
        except BufferError:
            self._alone.append(one)
        except KafkaException as error:
            report(error.args[0], None)

    def _answered(self, one: _Alone, problem: str | None) -> None:
        delivery, rejections = one.delivery, self._rejections
        rejections.suspects.discard((delivery.partition, delivery.offset))
        if problem is not None:
            rejections.record_rejection(time.monotonic())
        delivery.engine.answered(delivery, problem)

    def close(self) -> None:
        """Send nothing more: results that were gathered and not sent are not done."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._gathered, self._alone = [], []

    def _flush_gathered(self, producer: Producer, engine: Engine) -> None:
        if self._timer is not None:
            self._timer.cancel()
        gathered, self._gathered = self._gathered, []
        self._give(producer, gathered, engine, gathered=True)

    def _give(
        self,
        producer: Producer,
        records: Sequence[tuple[Any, ...]],
        engine: Engine,
        *,
        gathered: bool = False,
    ) -> None:
        """Hand results to the client. A client that refuses one ends the task: nothing may overtake that result.

        Raises :class:`Poison` for a result that is too large, while its message has not passed.
        """
        if engine.failure.done():
            return
        produce: Any = producer.produce  # its stub asks for a wider type of headers, which lists are not
        try:
            for record in records:
                while True:
                    try:
                        produce(*record)
                        break
                    except BufferError:
                        # Gigabytes wait for a broker that does not answer: nothing else can continue either.
                        producer.poll(0.1)
                        if engine.failure.done():  # an earlier result could not be written
                            return
        except Exception as error:
            if isinstance(error, KafkaException) and is_rejection(error.args[0]):
                if not gathered:
                    raise Poison(_why(record[0], error.args[0])) from error
                record[4](error.args[0], None)
                return
            engine.fail(self._no_results(error, record[0]))

    def look(self, engine: Engine) -> None:
        """Decide at intervals whether to gather results, by how many lanes or messages wait for the loop."""
        if self._alone:
            self._serve_alone()
        waiting = engine.held if engine.behind else len(engine.table.ready)
        self._least = min(self._least, waiting)
        now = time.monotonic()
        if now - self._reviewed_at < _REVIEW_INTERVAL_SECONDS or self._producer is None:
            return
        gathered, self._gathers = self._gathers, self._least > BUSY_LOOP_LANES
        self._direct = not self._gathers and not self._is_careful()
        self._oldest, self._newest = _times(self._rules)
        self._reviewed_at, self._least = now, waiting
        if gathered and not self._gathers:
            self._flush_gathered(self._producer, engine)  # before anything overtakes them

    def poll(self) -> None:
        """Serve delivery reports. Raises BrokerError when the results producer writes nothing more."""
        try:
            if self._producer is not None:
                self._producer.poll(0)
            self._worker_session.poll()
        except KafkaException as error:
            raise self._no_results(error, *self._topics) from error

    @staticmethod
    def _no_results(error: Exception, *topics: str) -> BrokerError:
        what = f"topic {' or '.join(map(repr, topics))} takes no results"
        if isinstance(error, KafkaException):
            found = error.args[0]
            if is_denied(found):
                return broker_error(what, found, *(on_topic(topic, Operation.WRITE) for topic in topics))
            return BrokerError(f"{what}: {found.str()}. What was not written runs again.")
        return BrokerError(f"{what}: {error}. What was not written runs again.")


def _times(rules: TopicRules) -> tuple[int, int]:
    """The oldest and the newest timestamp that a topic takes now, in milliseconds."""
    now = int(time.time() * 1000)
    before, after = (int(min(limit, _NO_LIMIT_MS)) for limit in (rules.max_age_ms, rules.max_ahead_ms))
    return now - before, now + after


def _why(sink: str, error: Any) -> str:
    return f"topic {sink!r} rejects the result: {error.str()}"
