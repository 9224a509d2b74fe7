"""Clients and restored state that a worker process keeps from one epoch to the next.

A session saves the time to start clients and to read state again. It holds nothing that is not in the broker too:
Spark usually reuses its Python workers, and gives a task to the same one, but promises neither. A task that does not
end as planned closes its session.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Literal

from keylane.engine.version_store import VersionStore
from keylane.kafka.client import KafkaException
from keylane.kafka.cluster import Cluster, load_metadata
from keylane.kafka.rejection import NO_RULES, TopicRules, smallest_limit
from keylane.kafka.settings import KafkaSettings
from keylane.kafka.transactional_client import discard
from keylane.kafka.transactional_writer import TransactionalWriter
from keylane.offsets.identity import AppIdentity
from keylane.rights import Operation, ResourceKind, app_rights
from keylane.state.labels import Labels
from keylane.state.topic import StateTopic
from keylane.worker.lane_values import LaneValues
from keylane.worker.telemetry_sender import TelemetrySender

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from keylane.engine.duplicates import Duplicates
    from keylane.kafka.client import Consumer, Producer
    from keylane.offsets.watermark import PartitionProgress
    from keylane.spec import AppSpec
    from keylane.worker.task_plan import TaskPlan


Use = Literal["results", "alone", "letters", "letter"]
"""What a producer is for: results, results sent one by one, dead letters, dead letters sent one by one."""
_DEAD_LETTER_SECONDS = 10.0
"""How long the producer tries to write a dead letter."""
_RESULTS_LINGER_MS = 1
"""The results' default ``linger.ms``. With 0 the producer sends the first of many gathered results alone, and the
others in small batches."""


class WorkerSession:
    """One app's clients in this process. Used by one task at a time.

    ``alone``: every record of a transaction is a batch of its own. Such a session is slow and is not kept.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        app: AppSpec,
        partitions: int,
        identity: AppIdentity,
        *,
        alone: bool = False,
    ) -> None:
        self.settings = settings
        self.identity = identity
        self.labels = Labels(identity)
        self._source_partitions = partitions
        self._known_partitions = partitions  # by the source consumer, since it was created
        self.alone = alone
        self._clients: dict[Use, Producer] = {}
        self._replaced: list[Producer] = []  # with results that are not acknowledged yet
        exact = {"isolation.level": "read_committed"} if app.delivery == "exactly_once" else {}
        # "error": the fetcher reports what is missing from the log, and decides where to continue.
        self.consumer: Consumer = settings.consumer(app.name, **exact, **{"auto.offset.reset": "error"})
        load_metadata(self.consumer, app.source)
        self.assigned: dict[int, int] = {}
        """The partitions that the consumer is assigned, and its next offset in each."""
        self.cluster = Cluster(settings)
        in_transactions = [app.state, *([app.ledger_topic] if app.ledger is not None else [])]
        in_transactions += [app.lane_state] if app.keeps_state else []
        written = [*app.sinks, app.dlq]
        self._rules = self.cluster.rules([*written, *in_transactions])
        if app.delivery == "exactly_once":
            in_transactions += written
        self.writer = TransactionalWriter(
            settings,
            app.name,
            app.state,
            self.consumer.consumer_group_metadata(),
            labels=self.labels,
            exact=app.delivery == "exactly_once",
            limit=self.rules(app.state).limit,
            batch_limit=smallest_limit(*map(self.rules, in_transactions)),
            alone=alone,
            rights=[
                right
                for right in app_rights(
                    app.name, app.source, app.sinks, ledger=app.ledger is not None, states=bool(app.states)
                )
                if right.operation is Operation.WRITE or right.kind is ResourceKind.GROUP
            ],
        )
        self.writer.limits = {topic: self.rules(topic).limit for topic in in_transactions}
        self.writer.source = app.source
        self.duplicates: Duplicates | None = None
        """The event ids of the last epoch."""
        self.versions: VersionStore | None = None
        """The versions of all entities of the last epoch, for an app with versions."""
        self.run = ""
        self.epoch = -1
        """The last epoch that ended here as planned."""
        self.committed: dict[int, PartitionProgress] = {}
        """The progress that it committed."""
        self.committed_at: dict[int, float] = {}
        """When it last committed each partition's offset, by the monotonic clock."""
        self.values: LaneValues | None = None
        """The lane state of the worker's ranges, for an app with states."""
        self._app = app
        self._learning = threading.Lock()
        self._sender: TelemetrySender | None = None
        self._state: StateTopic | None = None
        self.partitions: list[int] = []
        """The partitions whose state was read."""

    def rules(self, topic: str) -> TopicRules:
        """What the broker accepts in a topic that the app writes to."""
        return self._rules.get(topic, NO_RULES)

    def producer(self, use: Use) -> Producer:
        """The producer for records outside transactions. A new one needs half a second to connect."""
        found = self._clients.get(use)
        if found is None:
            found = self._clients[use] = self._create_producer(use)
        return found

    def _create_producer(self, use: Use) -> Producer:
        results = use in ("results", "alone")
        rules = [self.rules(topic) for topic in (self._app.sinks if results else (self._app.dlq,))]
        # A dead letter may be compressed to fit. Of several sinks the output checks each one's limit.
        limits = [each.record_limit for each in rules] if results else [0]
        record_limit = max(limits) if limits and all(limits) else 0
        more: dict[str, object] = {"linger.ms": 1}
        if use == "results":
            more["linger.ms"] = dict(self.settings.extra).get("linger.ms", _RESULTS_LINGER_MS)
            # Otherwise it writes later results before it reports that the broker rejected a batch.
            more["enable.gapless.guarantee"] = True
        elif use != "letters":
            more = {"linger.ms": 0, "batch.num.messages": 1}
        if not results:  # a dead letter may go to the spool instead, a result only to the sink
            more["message.timeout.ms"] = int(_DEAD_LETTER_SECONDS * 1000)
        return self.settings.producer(batch_limit=smallest_limit(*rules), record_limit=record_limit, **more)

    def poll(self) -> None:
        """Serve delivery reports, except those of ``"results"``. Raises KafkaException when ``"alone"`` has failed."""
        for use, client in list(self._clients.items()):
            if use == "results":
                continue
            try:
                client.poll(0)
            except KafkaException:
                if use == "alone":
                    raise
                self.replace(use, client)
        if self._replaced:
            self._replaced = [client for client in self._replaced if _purge(client)]

    def replace(self, use: Use, client: Producer) -> None:
        """Stop using this producer, if it is still in use. The next call of :meth:`producer` creates another one."""
        if self._clients.get(use) is client:
            self._replaced.append(self._clients.pop(use))

    async def purge_producers(self, seconds: float) -> None:
        """Make sure that no producer writes anything later, and serve the delivery reports.

        Records that were not sent are purged. Records in flight are waited for, up to ``seconds``. A producer that had
        any of them is not used again.
        """
        for use, client in list(self._clients.items()):
            if len(client):
                self.replace(use, client)
        deadline = time.monotonic() + seconds
        for in_flight in (False, True):
            while sum(_purge(client, in_flight=in_flight) for client in self._replaced):
                if time.monotonic() > deadline:
                    deadline += 1.0
                    break
                await asyncio.sleep(0.01)
        for client in self._replaced:
            discard(client)
        self._replaced = []

    @property
    def sender(self) -> TelemetrySender:
        """The sender of telemetry, created when it is first used."""
        if self._sender is None:
            self._sender = TelemetrySender(self.settings, self._app.telemetry_topic)
        return self._sender

    def state(
        self, partitions: Iterable[int], run: str, since: Mapping[int, int] | None = None
    ) -> StateTopic:
        """The state of these partitions, read at least as far as this worker has written. Blocks."""
        wanted = sorted(partitions)
        if (
            self._state is not None
            and (self.run, self.partitions) == (run, wanted)
            and self._state.read_through(self.writer.written, 1.0)
        ):
            self._state.repeat_commands()
            return self._state
        self.run, self.partitions, self.epoch = run, wanted, -1
        versions = None if self._app.versions is None else VersionStore()
        if self._state is None:
            self._state = StateTopic(
                self.settings,
                self._app.name,
                self._app.state,
                wanted,
                run,
                versions=versions,
                since=since,
                labels=self.labels,
            )
        else:
            self._state = self._state.reopen(wanted, run, versions, since, labels=self.labels)
        self._state.restore()
        return self._state

    def view(self, partition: int, plan: TaskPlan) -> StateTopic:
        """The state of one more partition, read to its end with a consumer of its own. Blocks. Raises BrokerError.

        From any thread. The producers know the partition afterwards, also if it was added to the source.
        """
        with self._learning:
            if plan.partitions > self._source_partitions:
                self._learn_partitions()
                self._source_partitions = plan.partitions
        found = StateTopic(
            self.settings,
            self._app.name,
            self._app.state,
            [partition],
            plan.run,
            since=plan.since,
            labels=self.labels,
        )
        try:
            found.restore()
        except BaseException:
            found.close()
            raise
        return found

    def _learn_partitions(self) -> None:
        """Refresh what the producers know of the topics. On their own they do it every few minutes."""
        self.writer.learn_partitions()
        for client in list(self._clients.values()):
            load_metadata(client, self._app.dlq)

    def is_new(self, partition: int) -> bool:
        """Whether the source consumer has to learn of this partition before it can fetch it."""
        return partition >= self._known_partitions

    def forget_state(self) -> None:
        """The ranges of the last epoch have changed: the next one reads everything again."""
        self.partitions, self.epoch = [], -1
        self.committed, self.committed_at = {}, {}
        self.duplicates = None

    def lane_values(self) -> LaneValues:
        """The lane state; created when it is first used. Blocks. Raises BrokerError."""
        if self.values is None:
            self.values = LaneValues(self.settings, self._app, self.cluster, self.identity)
        return self.values

    def has_progress_for(self, epoch: int, starts: Mapping[int, int]) -> bool:
        """Whether the epoch before this one ended here, at these offsets. Then its progress is still right."""
        return epoch == self.epoch + 1 and starts == {p: done.watermark for p, done in self.committed.items()}

    def keep_for_next_task(self) -> None:
        """Leave the session to the next task in this process.

        Close it if it is slow (``alone``), writes no more, or has clients from before partitions were added.
        """
        if self.alone or self.writer.failed or self._source_partitions != self._known_partitions:
            self.close()
            return
        _sessions[_session_key(self.settings, self._app, self._source_partitions, self.identity)] = self

    def close(self) -> None:
        """Close all clients. If the task did not release its claims, the next owner fences it."""
        for client in (*self._clients.values(), *self._replaced):
            discard(client)
        self._clients, self._replaced = {}, []
        self.writer.close()
        self.consumer.close()
        if self._sender is not None:
            self._sender.close()
        if self._state is not None:
            self._state.close()
        if self.values is not None:
            self.values.close()
            self.values = None


def _purge(client: Producer, *, in_flight: bool = False) -> int:
    """Purge records that were not sent, or all, and serve the reports. Return how many have no report yet."""
    for call in (lambda: client.purge(in_flight=in_flight), lambda: client.poll(0)):
        with contextlib.suppress(KafkaException):  # it repeats the error that it failed with
            call()
    return len(client)


_SessionKey = tuple[KafkaSettings, str, str, str, int, AppIdentity]
_sessions: dict[_SessionKey, WorkerSession] = {}


def _session_key(
    settings: KafkaSettings, app: AppSpec, partitions: int, identity: AppIdentity
) -> _SessionKey:
    """A session fits one app, source, delivery mode and partition count.

    The identity is part of the key because a session remembers offsets: those of a source that was deleted and created
    again mean nothing.
    """
    return settings, app.name, app.source, app.delivery, partitions, identity


def take_session(
    settings: KafkaSettings, app: AppSpec, partitions: int, identity: AppIdentity, *, alone: bool = False
) -> WorkerSession:
    """Take the kept session of this process, or create one. Blocks. Raises BrokerError.

    ``partitions``: how many the source has; clients that were created when it had fewer do not know the new ones.
    ``alone``: passed to :class:`WorkerSession` when one is created.
    """
    key = _session_key(settings, app, partitions, identity)
    found = _sessions.pop(key, None)
    if found is not None:
        return found
    outdated = [other for other in _sessions if other[:4] == key[:4]]  # another partition count or identity
    for other in outdated:
        _sessions.pop(other).close()
    return WorkerSession(settings, app, partitions, identity, alone=alone)
