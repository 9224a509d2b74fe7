"""For apps with ``commit="epoch"``: turns what tasks have proposed into progress when Spark has committed the epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keylane.denial import broker_error
from keylane.errors import BrokerError, TakenOverError
from keylane.kafka.client import KafkaException, TopicPartition
from keylane.kafka.cluster import REQUEST_SECONDS, Cluster
from keylane.kafka.lost_requests import LostRequests
from keylane.kafka.settings import client_log
from keylane.kafka.transactional_client import discard, is_fenced, transactional_producer
from keylane.offsets.metadata import METADATA_BYTES_MAX, stamp
from keylane.offsets.shard import WHOLE, Shard
from keylane.rights import Operation, on_group, on_topic
from keylane.state.labels import Labels
from keylane.state.ownership import run_id
from keylane.state.topic import ELSEWHERE, NOTHING, PROGRESS, RANGE, REDRIVEN, StateTopic

if TYPE_CHECKING:
    from collections.abc import Mapping

    from keylane.kafka.settings import KafkaSettings
    from keylane.kafka.transactional_writer import StateRecord
    from keylane.offsets.identity import AppIdentity


class EpochCommitter:
    """Commits for the planner. Its transactional id is the run's: another run that takes over fences it."""

    def __init__(
        self,
        settings: KafkaSettings,
        app: str,
        source: str,
        run: str,
        identity: AppIdentity,
        since: Mapping[int, int] | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        self._shard = shard
        self._settings = settings
        self._app = app
        self._source = source
        self._topic = f"{app}.state"
        self._run = run
        self.identity = identity
        self._labels = Labels(identity)
        self._since = since
        self._cluster = Cluster(settings)
        self._producer: Any = None
        self._lost = LostRequests(client_log)
        self._state: StateTopic | None = None
        self._group: Any = None
        self._settled = 0

    def settle(self, epoch: int) -> None:
        """Spark has committed this epoch. Raises TakenOverError when the app belongs to another run."""
        if epoch <= self._settled:
            return
        state = self._read()
        offsets: list[TopicPartition] = []
        notes: list[StateRecord] = []
        for partition, proposal in state.proposals.items():
            if proposal.epoch != epoch:
                continue  # of an epoch that Spark has not committed, or that was committed before
            text = proposal.text or NOTHING
            if len(stamp(text, self.identity.source)) > METADATA_BYTES_MAX:
                notes.append((partition, PROGRESS, f"{proposal.watermark} {text}".encode()))
                text = ELSEWHERE
            if proposal.redriven:
                notes.append((partition, REDRIVEN, proposal.redriven.encode()))
            notes += [
                (partition, bytes.fromhex(name), None if value is None else value.encode())
                for name, value in proposal.notes
            ]
            # Ranges were written by an app that committed continuously: they would take precedence over this.
            notes += [
                (partition, RANGE + str(slots).encode(), None)
                for slots in state.range_progresses.get(partition, ())
            ]
            metadata = stamp(text, self.identity.source)
            offsets.append(TopicPartition(self._source, partition, proposal.watermark, metadata=metadata))
        if offsets:
            self._write(offsets, notes)
        self._settled = epoch

    def close(self) -> None:
        """Close the clients."""
        if self._producer is not None:
            discard(self._producer)
        if self._state is not None:
            self._state.close()

    def _read(self) -> StateTopic:
        """The state topic as it is now."""
        if self._producer is None:
            # Create the producer before checking who owns the app: after that no other run can come in between.
            self._lost = LostRequests(client_log)
            self._producer = transactional_producer(
                self._settings, run_id(self._app, self._shard), lost=self._lost
            )
            consumer = self._settings.consumer(self._app)
            self._group = consumer.consumer_group_metadata()
            consumer.close()
        partitions = self._shard.of(range(self._cluster.partitions(self._topic)))
        if self._state is None:
            self._state = StateTopic(
                self._settings,
                self._app,
                self._topic,
                partitions,
                self._run,
                since=self._since,
                labels=self._labels,
            )
            self._state.restore()
        ends = self._cluster.ends(self._topic, partitions)
        if not self._state.read_through({p: end - 1 for p, end in ends.items()}, 3 * REQUEST_SECONDS):
            raise BrokerError(f"topic {self._topic!r} gives no answer; the epoch's progress is unknown")
        if self._state.successor is not None:
            raise TakenOverError(f"app {self._app!r} was taken over by another run; this one has ended")
        return self._state

    def _write(self, offsets: list[TopicPartition], notes: list[StateRecord]) -> None:
        try:
            self._producer.begin_transaction()
            for partition, name, value in notes:
                self._producer.produce(
                    self._topic, value, name, partition=partition, headers=self._labels.of(name)
                )
            self._producer.send_offsets_to_transaction(offsets, self._group, 3 * REQUEST_SECONDS)
            self._producer.commit_transaction(3 * REQUEST_SECONDS)
        except KafkaException as error:
            discard(self._producer)
            self._producer = None  # the next one aborts what this one began
            if is_fenced(error):
                raise TakenOverError(
                    f"app {self._app!r} was taken over by another run; this one has ended"
                ) from error
            raise broker_error(
                "the epoch's progress was refused",
                error.args[0],
                on_topic(self._topic, Operation.WRITE),
                on_group(self._app, Operation.READ),
            ) from error
        self._producer.poll(0)  # delivers the client's log
        if self._lost.any:  # a late request may still end the next transaction of this producer epoch
            discard(self._producer)
            self._producer = None
