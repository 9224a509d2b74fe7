"""What a worker keeps from one epoch to the next, so that the next begins without a client's start.

Spark uses its Python workers again, but nobody promises it, nor that a task comes back to the worker that had it: a
seat saves time and holds nothing that is not in the broker too. It is given up whenever a task does not end as planned.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from keylane.state.labels import Labels
from keylane.state.topic import StateTopic
from keylane.worker.telemetry_sender import TelemetrySender

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from keylane.engine.duplicates import Duplicates
    from keylane.kafka.client import Consumer, Producer
    from keylane.offsets.watermark import PartitionProgress
    from keylane.spec import AppSpec


Use = Literal["results", "alone", "letters", "letter"]
"""What a client is for: results, results that are sent alone, dead letters, dead letters that are sent alone."""
LETTER_SECONDS = 10.0
"""Seconds that the dead-letter topic has to take a letter."""
LINGER = 1
"""Milliseconds for which the client gathers by itself. Without it the client begins to send when it is given the first
of those that were gathered, and sends the others in bits."""


class WorkerSession:
    """One app's clients in this process. Used by one task at a time.

    ``alone``: every record of a transaction is a batch of its own; such a seat is not kept.
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
        self._count = partitions
        self.alone = alone
        self._clients: dict[Use, Producer] = {}
        self._replaced: list[Producer] = []  # that have not answered everything yet
        exact = {"isolation.level": "read_committed"} if app.delivery == "exactly_once" else {}
        # "error": the fetcher says what is missing from the log, and where it goes on.
        self.consumer: Consumer = settings.consumer(app.name, **exact, **{"auto.offset.reset": "error"})
        load_metadata(self.consumer, app.source)
        self.reading: dict[int, int] = {}
        """The partitions that the consumer is assigned, and where it goes on in each."""
        self.cluster = Cluster(settings)
        in_transactions = [app.state, *([app.ledger_topic] if app.ledger is not None else [])]
        written = [*([app.sink] if app.sink else []), app.dlq]
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
        )
        self.seen: Duplicates | None = None
        """The event ids that were seen in the last epoch."""
        self.versions: VersionStore | None = None
        """How far the entities of an app with versions are."""
        self.run = ""
        self.epoch = -1
        """The epoch that ended here as planned."""
        self.committed: dict[int, PartitionProgress] = {}
        """With this progress."""
        self.committed_at: dict[int, float] = {}
        """When each partition's offset was committed last, by the monotonic clock."""
        self._app = app
        self._sender: TelemetrySender | None = None
        self._state: StateTopic | None = None
        self.partitions: list[int] = []
        """Whose state it knows."""

    def rules(self, topic: str) -> TopicRules:
        """What a topic takes that the app writes to."""
        return self._rules.get(topic, NO_RULES)

    def producer(self, use: Use) -> Producer:
        """A client for what is in no transaction. A new one is ready after half a second."""
        found = self._clients.get(use)
        if found is None:
            found = self._clients[use] = self._make(use)
        return found

    def _make(self, use: Use) -> Producer:
        results = use in ("results", "alone")
        rules = self.rules((self._app.sink or "") if results else self._app.dlq)
        record_limit = rules.record_limit if results else 0  # a letter may be compressed below the topic's
        more: dict[str, object] = {"linger.ms": 1}
        if use == "results":
            more["linger.ms"] = dict(self.settings.extra).get("linger.ms", LINGER)
            # Otherwise it would write what is behind a batch that the broker rejected, before anybody knows.
            more["enable.gapless.guarantee"] = True
        elif use != "letters":
            more = {"linger.ms": 0, "batch.num.messages": 1}
        if not results:  # a letter is given up after a while, a result never
            more["message.timeout.ms"] = int(LETTER_SECONDS * 1000)
        return self.settings.producer(batch_limit=rules.limit, record_limit=record_limit, **more)

    def poll(self) -> None:
        """Serve the reports of all clients but the results'. Raises KafkaException when one of results has failed."""
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
            self._replaced = [client for client in self._replaced if _taken_back(client)]

    def replace(self, use: Use, client: Producer) -> None:
        """Make a new client the next time, unless there is one already: this one writes nothing more."""
        if self._clients.get(use) is client:
            self._replaced.append(self._clients.pop(use))

    async def recall(self, seconds: float) -> None:
        """See to it that nothing of what was handed over is written later, and serve the reports of it.

        What was not sent yet is taken back; what was sent has so many seconds for its answer. A client that still had
        something is not used again.
        """
        for use, client in list(self._clients.items()):
            if len(client):
                self.replace(use, client)
        deadline = time.monotonic() + seconds
        for late in (False, True):
            while sum(_taken_back(client, in_flight=late) for client in self._replaced):
                if time.monotonic() > deadline:
                    deadline += 1.0
                    break
                await asyncio.sleep(0.01)
        for client in self._replaced:
            discard(client)
        self._replaced = []

    @property
    def sender(self) -> TelemetrySender:
        """For telemetry."""
        if self._sender is None:
            self._sender = TelemetrySender(self.settings, self._app.telemetry_topic)
        return self._sender

    def state(
        self, partitions: Iterable[int], run: str, since: Mapping[int, int] | None = None
    ) -> StateTopic:
        """The state topic's view of these partitions, read to what this worker has written, at least."""
        wanted = sorted(partitions)
        if (
            self._state is not None
            and (self.run, self.partitions) == (run, wanted)
            and self._state.read_through(self.writer.written, 1.0)
        ):
            self._state.begin_again()
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
            self._state = self._state.of(wanted, run, versions, since, labels=self.labels)
        self._state.restore()
        return self._state

    def stands(self, epoch: int, starts: Mapping[int, int]) -> bool:
        """Whether the epoch before this one ended here, at these offsets: then nothing has changed since."""
        return epoch == self.epoch + 1 and starts == {p: done.watermark for p, done in self.committed.items()}

    def keep(self) -> None:
        """For the next task here. Those whose transactions are slow are not kept."""
        if self.alone:
            self.close()
            return
        _sessions[_session_key(self.settings, self._app, self._count, self.identity)] = self

    def close(self) -> None:
        """Give everything up. A claim that still stands is fenced by whoever comes next."""
        for client in (*self._clients.values(), *self._replaced):
            discard(client)
        self._clients, self._replaced = {}, []
        self.writer.close()
        self.consumer.close()
        if self._sender is not None:
            self._sender.close()
        if self._state is not None:
            self._state.close()


def _taken_back(client: Producer, *, in_flight: bool = False) -> int:
    """Take back what has not been sent, or everything, and serve the reports; how many are not answered."""
    for call in (lambda: client.purge(in_flight=in_flight), lambda: client.poll(0)):
        with contextlib.suppress(KafkaException):  # what it has failed with, said once more
            call()
    return len(client)


_SessionKey = tuple[KafkaSettings, str, str, str, int, AppIdentity]
_sessions: dict[_SessionKey, WorkerSession] = {}


def _session_key(
    settings: KafkaSettings, app: AppSpec, partitions: int, identity: AppIdentity
) -> _SessionKey:
    """Apps of one name that read other topics, or more partitions, or write in another way, need other clients.

    So does an app whose source was deleted and created again: what a seat remembers is about the topic that was.
    """
    return settings, app.name, app.source, app.delivery, partitions, identity


def partitions_of_last_epoch(
    settings: KafkaSettings, app: AppSpec, partitions: int, identity: AppIdentity
) -> list[int]:
    """The partitions that this worker had last, and knows; none when it has no seat."""
    found = _sessions.get(_session_key(settings, app, partitions, identity))
    return [] if found is None else found.partitions


def take_session(
    settings: KafkaSettings, app: AppSpec, partitions: int, identity: AppIdentity, *, alone: bool = False
) -> WorkerSession:
    """The worker's seat: nobody else has it until it is kept again. Blocks. Raises BrokerError.

    ``partitions`` are those of the source: clients that were made when there were fewer do not know the others.
    ``alone``: as :class:`WorkerSession` takes it, when a new one has to be made.
    """
    place = _session_key(settings, app, partitions, identity)
    found = _sessions.pop(place, None)
    if found is not None:
        return found
    for other in [
        other for other in _sessions if other[:4] == place[:4]
    ]:  # of a source that is no more as it was
        _sessions.pop(other).close()
    return WorkerSession(settings, app, partitions, identity, alone=alone)
