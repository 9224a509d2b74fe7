"""What a worker keeps from one epoch to the next, so that the next begins without a client's start.

Spark uses its Python workers again, but nobody promises it, nor that a task comes back to the worker that had it: a
seat saves time and holds nothing that is not in the broker too. It is given up whenever a task does not end as planned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.engine.versionstore import VersionStore
from keylane.kafka.cluster import Cluster, introduce
from keylane.kafka.output import LINGER
from keylane.kafka.scribe import Scribe
from keylane.kafka.settings import KafkaSettings
from keylane.kafka.state import State
from keylane.kafka.telemetry import Sender

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from confluent_kafka import Consumer, Producer

    from keylane.app import App
    from keylane.core.watermark import Progress
    from keylane.engine.duplicates import Duplicates


class Seat:
    """One app's clients in this process. Used by one task at a time."""

    def __init__(self, settings: KafkaSettings, app: App, partitions: int) -> None:
        self.settings = settings
        self._count = partitions
        exact = {"isolation.level": "read_committed"} if app.delivery == "exactly_once" else {}
        # "error": the fetcher says what is missing from the log, and where it goes on.
        self.consumer: Consumer = settings.consumer(app.name, **exact, **{"auto.offset.reset": "error"})
        introduce(self.consumer, app.source)
        self.reading: dict[int, int] = {}
        """The partitions that the consumer is assigned, and where it goes on in each."""
        self.cluster = Cluster(settings)
        self.scribe = Scribe(
            settings,
            app.name,
            app.state,
            self.consumer.consumer_group_metadata(),
            exact=app.delivery == "exactly_once",
        )
        self.seen: Duplicates | None = None
        """The event ids that were seen in the last epoch."""
        self.versions: VersionStore | None = None
        """How far the entities of an app with versions are."""
        self.run = ""
        self.epoch = -1
        """The epoch that ended here as planned."""
        self.committed: dict[int, Progress] = {}
        """With this progress."""
        self._app = app
        self._producer: Producer | None = None
        self._sender: Sender | None = None
        self._state: State | None = None
        self.partitions: list[int] = []
        """Whose state it knows."""

    @property
    def producer(self) -> Producer:
        """For results that are in no transaction. A new one is ready after half a second."""
        if self._producer is None:
            asked = dict(self.settings.extra).get("linger.ms", LINGER)
            self._producer = self.settings.producer(**{"linger.ms": asked})
        return self._producer

    @property
    def sender(self) -> Sender:
        """For telemetry."""
        if self._sender is None:
            self._sender = Sender(self.settings, self._app.telemetry_topic)
        return self._sender

    def state(self, partitions: Iterable[int], run: str, since: Mapping[int, int] | None = None) -> State:
        """The state topic's view of these partitions, read to what this worker has written, at least."""
        wanted = sorted(partitions)
        if (
            self._state is not None
            and (self.run, self.partitions) == (run, wanted)
            and self._state.read_through(self.scribe.written, 1.0)
        ):
            self._state.begin_again()
            return self._state
        self.run, self.partitions, self.epoch = run, wanted, -1
        versions = None if self._app.versions is None else VersionStore()
        if self._state is None:
            self._state = State(
                self.settings,
                self._app.name,
                self._app.state,
                wanted,
                run,
                versions=versions,
                since=since,
            )
        else:
            self._state = self._state.of(wanted, run, versions, since)
        self._state.restore()
        return self._state

    def stands(self, epoch: int, starts: Mapping[int, int]) -> bool:
        """Whether the epoch before this one ended here, at these offsets: then nothing has changed since."""
        return epoch == self.epoch + 1 and starts == {p: done.watermark for p, done in self.committed.items()}

    def keep(self) -> None:
        """For the next task here."""
        _seats[_place(self.settings, self._app, self._count)] = self

    def close(self) -> None:
        """Give everything up. A claim that still stands is fenced by whoever comes next."""
        self.scribe.close()
        self.consumer.close()
        if self._sender is not None:
            self._sender.close()
        if self._state is not None:
            self._state.close()


_Place = tuple[KafkaSettings, str, str, str, int]
_seats: dict[_Place, Seat] = {}


def _place(settings: KafkaSettings, app: App, partitions: int) -> _Place:
    """Apps of one name that read other topics, or more partitions, or write in another way, need other clients."""
    return settings, app.name, app.source, app.delivery, partitions


def seated(settings: KafkaSettings, app: App, partitions: int) -> list[int]:
    """The partitions that this worker had last, and knows; none when it has no seat."""
    found = _seats.get(_place(settings, app, partitions))
    return [] if found is None else found.partitions


def take_seat(settings: KafkaSettings, app: App, partitions: int) -> Seat:
    """The worker's seat: nobody else has it until it is kept again. Blocks. Raises KafkaError.

    ``partitions`` are those of the source: clients that were made when there were fewer do not know the others.
    """
    return _seats.pop(_place(settings, app, partitions), None) or Seat(settings, app, partitions)
