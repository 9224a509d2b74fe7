"""Fences of earlier owners, for a worker that claims: each claim is answered by one fence, and each wait has an end.

A fence aborts the owner's open transaction. What stays open after that is a transaction of another producer: of a
worker that died while it claimed, whose id only its hidden claim names, or of a live one, which ends it soon. Or it
hangs: the broker's coordinator has forgotten it. Kafka 4.3 forgets the partitions of a committed or aborted transaction
that have no leader when it is about to write its markers there, as when a single broker was killed and came back
quickly ("likely deleted already and hence can be skipped" in the broker's log). Readers of committed records then wait
for ever.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from keylane.errors import BrokerError
from keylane.kafka.cluster import REQUEST_SECONDS, Cluster
from keylane.kafka.transactional_client import TRANSACTION_SECONDS, end_hanging_transaction, fence
from keylane.state.hidden_claims import HiddenClaims, read_hidden_claims

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from keylane.kafka.settings import KafkaSettings
    from keylane.state.topic import Claim

log = logging.getLogger("keylane.task")

HIDDEN_SECONDS = 2.0
"""Time in which what was committed becomes readable. After that the open transaction in front of it is looked at."""
HANGING_SECONDS = 10.0
"""Time after a fence in which claims become readable, unless a transaction of a fenced owner hangs."""
SETTLE_SECONDS = 2.0
"""Time in which most live producers end their transactions. To abort one more of a fenced owner harms nobody."""
READABLE_SECONDS = TRANSACTION_SECONDS + 2 * REQUEST_SECONDS
"""By then the broker has ended every transaction that it knows to be open: it looks every 10 s."""
_LOOK_SECONDS = 0.1

Places = dict[tuple[str, int], int]
"""By topic and partition: the offset at which the first open transaction begins."""


class Fences:
    """The fences of one claim. ``topic``: the app's state topic. Blocks; used by one thread."""

    def __init__(self, settings: KafkaSettings, app: str, topic: str) -> None:
        self._settings = settings
        self._app = app
        self._topic = topic
        self._lazy_cluster: Cluster | None = None
        self._fenced: set[tuple[str, int]] = set()  # owners, and the offsets of their claims
        self._since = time.monotonic()  # of the last fence
        self._looked = 0.0
        self._ended_hanging = False

    @property
    def none(self) -> bool:
        """Whether nobody was fenced."""
        return not self._fenced

    @property
    def _cluster(self) -> Cluster:
        if self._lazy_cluster is None:
            self._lazy_cluster = Cluster(self._settings)
        return self._lazy_cluster

    def has(self, owner: str, claim: Claim) -> bool:
        """Whether the owner was fenced because of this claim."""
        return (owner, claim.place) in self._fenced

    def fence(self, owners: Mapping[str, Claim]) -> None:
        """Fence these owners. Raises BrokerError."""
        for owner, claim in owners.items():
            log.warning("fencing the earlier owner, which did not release: %s", claim.who)
            fence(self._settings, owner)
            self._fenced.add((owner, claim.place))
        self._since = time.monotonic()

    def hidden(self, partitions: Iterable[int]) -> HiddenClaims:
        """What stays unreadable in these partitions of the state topic, if it is time to look; else nothing.

        Raises BrokerError when the wait for it has to end.
        """
        now = time.monotonic()
        if now - max(self._since, self._looked) < HIDDEN_SECONDS:
            return HiddenClaims()
        found = read_hidden_claims(self._settings, self._cluster, self._app, self._topic, partitions)
        self._looked = time.monotonic()
        if now - self._since > READABLE_SECONDS:
            raise BrokerError(self._unreadable({(self._topic, p): at for p, at in found.starts.items()}))
        if now - self._since > HANGING_SECONDS and found.starts and not self._ended_hanging:
            self._ended_hanging = True
            self._end_hanging({(self._topic, p): at for p, at in found.starts.items()})
        return found

    def settle(self, topics: Collection[str], source: str, partitions: Collection[int]) -> None:
        """End what the fenced owners left open in these topics and in the group's offsets of the source.

        Only then is the group's progress certain. Nothing to do if nobody was fenced. Raises BrokerError.
        """
        if not self._fenced:
            return
        stuck = self._open(topics)
        deadline = time.monotonic() + SETTLE_SECONDS
        while stuck and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            now_open = self._open({topic for topic, _ in stuck})
            stuck = {place: start for place, start in stuck.items() if now_open.get(place) == start}
        if stuck or not self._has_stable_offsets(source, partitions):
            self._end_hanging(stuck)
            left = {place for place, start in self._open(topics).items() if stuck.get(place) == start}
            if left:  # of a live producer, or of another dead one, which its own successor fences
                log.info("%s", self._advice({place: stuck[place] for place in left}))

    def _open(self, topics: Collection[str]) -> Places:
        """Partitions of these topics with an open transaction."""
        found: Places = {}
        for topic in topics:
            numbers = range(self._cluster.partitions(topic))
            stable = self._cluster.ends(topic, numbers, committed=True)
            ends = self._cluster.ends(topic, numbers)
            found |= {(topic, p): stable[p] for p in numbers if stable[p] < ends[p]}
        return found

    def _has_stable_offsets(self, source: str, partitions: Collection[int]) -> bool:
        """Whether no transaction is open that contains offsets of the group. True without a source."""
        if not source:
            return True
        try:
            self._cluster.committed(self._app, source, partitions, stable=True)
        except BrokerError:
            return False
        return True

    def _end_hanging(self, places: Places) -> None:
        """In case it is a fenced owner whose transaction is still open."""
        consumer = self._settings.consumer(self._app)
        group = consumer.consumer_group_metadata()
        consumer.close()
        for owner in sorted({owner for owner, _ in self._fenced}):
            log.info(
                "open after the fence, aborting one more in case it hangs transactional_id=%s where=%s",
                owner,
                _where(places) or "the group's offsets",
            )
            try:
                end_hanging_transaction(self._settings, owner, places, group, self._topic)
            except BrokerError as error:
                log.warning("%s", error)

    def _unreadable(self, places: Places) -> str:
        what = f"app {self._app!r}: the claim was written, but it cannot be read for {READABLE_SECONDS:g} s"
        if not places:
            return f"{what}: topic {self._topic!r} gives no answer"
        return f"{what}. {self._advice(places)}"

    def _advice(self, places: Places) -> str:
        tool = f"kafka-transactions.sh --bootstrap-server {self._settings.bootstrap}"
        (topic, partition), start = next(iter(places.items()))
        fenced = ", ".join(sorted({owner for owner, _ in self._fenced})) or "none"
        return (
            f"A transaction is open in {_where(places)}. Transactional ids that were fenced: {fenced}. If it is open "
            f"for longer than {READABLE_SECONDS:g} s, it hangs, or a live producer keeps it open. See whose it is: "
            f"{tool} describe-producers --topic {topic} --partition {partition}. If it hangs, abort it: "
            f"{tool} abort --topic {topic} --partition {partition} --start-offset {start}"
        )


def _where(places: Places) -> str:
    return ", ".join(
        f"{topic}/{partition} from offset {start}" for (topic, partition), start in places.items()
    )
