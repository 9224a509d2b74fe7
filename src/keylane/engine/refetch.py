"""Refetches of one engine: evicted messages that are being read from the log again."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from keylane.errors import SourceChangedError
from keylane.logs import short

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from keylane.engine.attempts import RetryAttempts
    from keylane.engine.counters import MessageCounters
    from keylane.engine.delivery import Delivery
    from keylane.engine.duplicates import Duplicates
    from keylane.engine.lifecycle import Lifecycle
    from keylane.lanes.lane_table import Holds
    from keylane.lanes.ordering import Ordering
    from keylane.message import Record


@dataclass(slots=True, kw_only=True)
class _LaneRequest:
    """Messages of one lane that are being read again. Written by :class:`Refetches`."""

    on_returned: Callable[[list[Delivery], int], None]
    key: bytes | None
    """Of their lane."""
    partition: int
    offsets: Sequence[int]
    missing: int = 0
    returned: list[Delivery] = field(default_factory=list)


class Refetches:
    """The requests of one engine, by ticket. Used only on its loop.

    ``fetch(ticket, partition, offsets)`` reads messages again; the answer comes with :meth:`returned`.
    ``on_evicted(partition, count, bytes)`` is called when messages are evicted; with numbers below zero when room is
    needed for messages that are read again.
    """

    def __init__(
        self,
        *,
        fetch: Callable[[int, int, Sequence[int]], None] | None,
        on_evicted: Callable[[int, int, int], None],
        make: Callable[[Record], Delivery],
        order: Ordering,
        counters: MessageCounters,
        attempts: RetryAttempts,
        duplicates: Duplicates,
        life: Lifecycle,
    ) -> None:
        self.possible = fetch is not None
        """Whether messages can be read again: else none may be evicted."""
        self.incoming = 0  # written by request() and returned(): messages that are being read again
        self._fetch = fetch
        self._on_evicted = on_evicted
        self._make = make
        self._order = order
        self._counters = counters
        self._attempts = attempts
        self._duplicates = duplicates
        self._life = life
        self._tickets = count(1)
        self._requests: dict[int, _LaneRequest] = {}  # written by request() and returned(): by ticket

    def evicted(self, delivery: Delivery) -> None:
        """Only the offset of this message is kept."""
        self._on_evicted(delivery.partition, 1, len(delivery.original or b""))

    def request(
        self,
        key: bytes | None,
        partition: int,
        offsets: Sequence[int],
        on_returned: Callable[[list[Delivery], int], None],
    ) -> None:
        """Read evicted messages of one lane again; ``on_returned`` gets them, and how many are no longer in the log."""
        ticket = next(self._tickets)
        self._requests[ticket] = _LaneRequest(
            on_returned=on_returned, key=key, partition=partition, offsets=offsets
        )
        self.incoming += len(offsets)
        self._on_evicted(partition, -len(offsets), 0)  # at once, so that nothing else takes the room
        self._fetch(ticket, partition, offsets)  # type: ignore[misc]  # nothing is evicted without it

    def are_open(self, holds: Holds) -> bool:
        """Whether messages of this range are being read again."""
        return any(holds(one.partition, one.key, one.offsets[0]) for one in self._requests.values())

    def returned(self, ticket: int, records: Sequence[Record], missing: int) -> None:
        """Messages of a request, in order, in one call or several; ``missing`` are no longer in the log.

        The engine fails when one belongs to another lane: then these are not the messages that were evicted.
        """
        request = self._requests.get(ticket)
        if request is None:
            return
        size = 0
        for record in records:
            delivery = self._make(record)
            found = self._order.lane_key(delivery)
            if found != request.key:
                self._life.fail(
                    SourceChangedError(
                        f"expected a message of lane {short(request.key)!r} at {delivery.position}, found one of lane "
                        f"{short(found)!r}: the source topic was recreated. The next epoch reads it from its start"
                    )
                )
                return
            request.returned.append(delivery)
            size += len(delivery.value or b"")
        self._attempts.recall(request.returned[len(request.returned) - len(records) :])
        self._on_evicted(request.partition, 0, -size)
        request.missing += missing
        self._counters.accepted -= missing
        if len(request.returned) + request.missing < len(request.offsets):
            return
        del self._requests[ticket]
        self.incoming -= len(request.offsets)
        if request.missing:
            gone = set(request.offsets).difference(delivery.offset for delivery in request.returned)
            self._duplicates.gone(request.partition, gone)
            for offset in gone:
                self._attempts.forget(request.partition, offset)
        request.on_returned(request.returned, request.missing)
