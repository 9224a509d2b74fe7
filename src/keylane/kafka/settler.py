"""For apps with ``commit="epoch"``: what tasks have proposed becomes progress when Spark has committed the epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException, TopicPartition

from keylane.core.progress import LIMIT
from keylane.errors import KafkaError, TakenOverError
from keylane.kafka.cluster import TIMEOUT, Cluster
from keylane.kafka.state import ELSEWHERE, NOTHING, PROGRESS, REDRIVEN, State
from keylane.kafka.transactions import is_fenced, leave, transactional

if TYPE_CHECKING:
    from collections.abc import Mapping

    from keylane.kafka.settings import KafkaSettings


class Settler:
    """The planner's. Its transactional id is the run's: another run that takes over fences it."""

    def __init__(
        self,
        settings: KafkaSettings,
        app: str,
        source: str,
        run: str,
        since: Mapping[int, int] | None = None,
    ) -> None:
        self._settings = settings
        self._app = app
        self._source = source
        self._topic = f"{app}.state"
        self._run = run
        self._since = since
        self._cluster = Cluster(settings)
        self._producer: Any = None
        self._state: State | None = None
        self._group: Any = None
        self._settled = 0

    def settle(self, epoch: int) -> None:
        """Spark has committed this epoch. Raises TakenOverError when the app belongs to another run."""
        if epoch <= self._settled:
            return
        state = self._read()
        offsets, notes = [], []
        for partition, proposal in state.proposals.items():
            if proposal.epoch != epoch:
                continue  # of an epoch that Spark has not committed, or that counts already
            metadata = proposal.text or NOTHING
            if len(metadata) > LIMIT:
                notes.append((partition, PROGRESS, f"{proposal.watermark} {metadata}".encode()))
                metadata = ELSEWHERE
            if proposal.redriven:
                notes.append((partition, REDRIVEN, proposal.redriven.encode()))
            offsets.append(TopicPartition(self._source, partition, proposal.watermark, metadata=metadata))
        if offsets:
            self._write(offsets, notes)
        self._settled = epoch

    def _read(self) -> State:
        """The state topic as it is now."""
        if self._producer is None:
            # First this, then the look at who owns the app: from here on another run cannot come in between.
            self._producer = transactional(self._settings, f"{self._app}.run")
            consumer = self._settings.consumer(self._app)
            self._group = consumer.consumer_group_metadata()
            consumer.close()
        partitions = range(self._cluster.partitions(self._topic))
        if self._state is None:
            self._state = State(
                self._settings, self._app, self._topic, partitions, self._run, since=self._since
            )
            self._state.restore()
        ends = self._cluster.ends(self._topic, partitions)
        if not self._state.read_through({p: end - 1 for p, end in ends.items()}, 3 * TIMEOUT):
            raise KafkaError(f"topic {self._topic!r} gives no answer; the epoch's progress is not known")
        if self._state.successor is not None:
            raise TakenOverError(f"app {self._app!r} was taken over by another run; this one has ended")
        return self._state

    def _write(self, offsets: list[TopicPartition], notes: list[tuple[int, bytes, bytes]]) -> None:
        try:
            self._producer.begin_transaction()
            for partition, name, value in notes:
                self._producer.produce(self._topic, value, name, partition=partition)
            self._producer.send_offsets_to_transaction(offsets, self._group, 3 * TIMEOUT)
            self._producer.commit_transaction(3 * TIMEOUT)
        except KafkaException as error:
            leave(self._producer)
            self._producer = None  # whatever was begun is aborted by the next one
            if is_fenced(error):
                raise TakenOverError(
                    f"app {self._app!r} was taken over by another run; this one has ended"
                ) from error
            raise KafkaError(f"the epoch's progress was not taken: {error.args[0].str()}") from error
