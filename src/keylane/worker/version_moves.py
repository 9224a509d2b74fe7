"""Versions of entities whose keys moved to other partitions, because partitions were added to the source.

An entity's mark is in the state partition of its key's source partition. When the topic grows, some keys move to other
partitions. The old ones are finished before the new ones are read, so all marks are final by then. The first task that
owns a partition under the new number searches all state partitions for the marks of its keys, and writes them into its
own. The partition of a key follows from murmur2, which Java clients and Keylane use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keylane.engine.version_store import Moves
from keylane.errors import BrokerError
from keylane.policies.versions import decode_mark
from keylane.state.topic import VERSION, StateTopic

if TYPE_CHECKING:
    from collections.abc import Mapping

    from keylane.engine.version_store import VersionStore
    from keylane.offsets.slots import Slots
    from keylane.spec import AppSpec
    from keylane.worker.session import WorkerSession

_OPEN_TRANSACTION_SECONDS = 30.0
"""Time to wait for records behind an open transaction."""


class _AllVersions(StateTopic):
    """A view of all state partitions that reads only versions."""

    moves: Moves

    def take_into(self, moves: Moves) -> None:
        """Store the marks in ``moves``."""
        self.moves, self.versions, self._versions_only = moves, moves.store, True

    def _apply(self, message: Any, name: bytes, value: bytes | None) -> None:
        known = value is not None and self._labels.accepts(name, message)
        mark = decode_mark(value) if known and value is not None else None
        written = max(0, message.timestamp()[1])
        self.moves.put(message.partition(), name.removeprefix(VERSION), mark, written)


def gather(
    worker_session: WorkerSession, app: AppSpec, partitions: int, slots: Mapping[int, Slots]
) -> VersionStore:
    """Return all marks of the keys that are in these partitions now. Blocks. Raises BrokerError."""
    count = worker_session.cluster.partitions(app.state)
    state = _AllVersions(
        worker_session.settings, app.name, app.state, range(count), "", labels=worker_session.labels
    )
    state.take_into(Moves(partitions, slots))
    try:
        ends = worker_session.cluster.ends(app.state, range(count))
        state.restore()
        if not state.read_through({p: end - 1 for p, end in ends.items()}, _OPEN_TRANSACTION_SECONDS):
            raise BrokerError(
                f"topic {app.state!r} could not be read to its end: a transaction in it is open. The versions of keys "
                "that moved to other partitions are not known before it ends"
            )
    finally:
        state.close()
    return state.moves.store
