"""An operator's side of the state topic: what lanes have stopped, orders, and what came of them."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Self

from keylane.errors import KafkaError
from keylane.kafka.cluster import TIMEOUT, Cluster
from keylane.kafka.orders import Order, audit_name, me, new_id
from keylane.kafka.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from confluent_kafka import Producer

    from keylane.core.ranges import Ranges
    from keylane.core.record import Kept, LaneRecord
    from keylane.kafka.orders import Deed
    from keylane.kafka.settings import KafkaSettings

_AT_A_TIME = 50
"""How often the state is polled in one go: it hands over a hundred records each time."""
_GRACE = 3.0
"""Seconds in which the answer must have come to an order that stands no more."""
_TALLY = re.compile(r"(\d+) through, (\d+) dead again, (\d+) still parked")


class NeverRanError(KafkaError):
    """The app has no state topic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What became of redriven letters."""

    through: int
    dead: int
    parked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of an order."""

    ok: bool
    result: str
    owner: str
    at: float

    @property
    def tally(self) -> Tally | None:
        """Of a redrive: what became of its letters."""
        found = _TALLY.fullmatch(self.result)
        if found is None:
            return None
        through, dead, parked = map(int, found.groups())
        return Tally(through=through, dead=dead, parked=parked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What came of orders, by their ids. Those in neither were not answered, and stand."""

    answers: Mapping[str, Answer]
    lost: frozenset[str]
    """They stand no more, and nobody said what came of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An order as it was written down when it was given, and what came of it."""

    id: str
    do: str
    partition: int
    key: bytes | None
    offset: int
    letters: int | None
    """How many were named; None: all of the lane, or it was no redrive."""
    who: str
    at: float
    stands: bool
    answer: Answer | None
    """None when nobody has carried it out: it stands, or another order of its lane has taken its place."""


class Operator:
    """Reads an app's state topic to its end, follows it, and writes orders. One thread uses it; close it at the end.

    Raises :class:`NeverRanError` when the app has no state topic, :class:`KafkaError` when that cannot be read.
    """

    def __init__(self, settings: KafkaSettings, app: str) -> None:
        self.app = app
        self._settings = settings
        self._topic = f"{app}.state"
        self._producer: Producer | None = None
        partitions = Cluster(settings).topics().get(self._topic)
        if partitions is None:
            raise NeverRanError(
                f"app {app!r} never ran at {settings.bootstrap}: topic {self._topic!r} does not exist"
            )
        self._state = State(settings, app, self._topic, range(partitions), run="")
        self._state.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the consumer."""
        self._state.close()

    # What there is.

    def plan(self) -> dict[str, Any] | None:
        """The plan of the epoch that runs, or ran last: ``run``, ``epoch``, ``at`` and ``tasks``; None before that."""
        self._follow()
        return self._state.plan or None

    def lanes(self) -> list[LaneRecord]:
        """The lanes that do not go on by themselves, those that stopped first at the front."""
        self._follow()
        return sorted(self._state.lanes.values(), key=lambda record: record.since)

    def attempts(self) -> Mapping[int, Mapping[int, Kept]]:
        """Messages that have failed and are not done, by partition and offset, as tasks wrote them down last."""
        self._follow()
        return {
            partition: {offset: kept for record in records.values() for offset, kept in record.items()}
            for partition, records in self._state.attempts.items()
        }

    def standing(self) -> list[Order]:
        """Orders that no task has carried out yet."""
        self._follow()
        return sorted(self._state.orders.values(), key=lambda order: order.at)

    def redriven(self) -> Mapping[int, Ranges]:
        """Letters that were redriven: their offsets among the dead letters, by partition."""
        self._follow()
        return self._state.redriven

    def audit(self) -> list[Action]:
        """Every order ever given, oldest first, with what came of it. What makes no sense is left out."""
        self._follow()
        stand = {order.id for order in self._state.orders.values()}
        actions = []
        for name, (partition, value) in self._state.audits.items():
            if _by_the_app(name):
                continue
            try:
                found = json.loads(value)
                action = Action(
                    id=str(found["id"]),
                    do=str(found["do"]),
                    partition=partition,
                    key=None if found["key"] is None else bytes.fromhex(found["key"]),
                    offset=int(found["offset"]),
                    letters=None if found["letters"] is None else int(found["letters"]),
                    who=str(found["who"]),
                    at=float(found["at"]),
                    stands=found["id"] in stand,
                    answer=self._answer(str(found["id"])),
                )
            except (ValueError, KeyError, TypeError):  # anybody may have written into the topic
                continue
            actions.append(action)
        return sorted(actions, key=lambda action: action.at)

    # Orders.

    def order(
        self,
        do: Deed,
        *,
        partition: int,
        key: bytes | None,
        offset: int = 0,
        letters: Sequence[int] | None = None,
    ) -> Order:
        """Give an order and write down who gave it. It is carried out by the running app, or when it starts."""
        order = new_order(do, partition=partition, key=key, offset=offset, letters=letters)
        self.give([order])
        return order

    def give(self, orders: Iterable[Order]) -> None:
        """Write these orders; each takes the place of one that stands for the same lane.

        Raises KafkaError when one of them was not taken.
        """
        if self._producer is None:  # it takes half a second to be ready: made once, for the first order
            self._producer = self._settings.producer(**{"message.timeout.ms": int(TIMEOUT * 1000)})
        producer = self._producer
        failed: list[str] = []

        def report(error: object, _message: object) -> None:
            if error is not None:
                failed.append(str(error))

        for order in orders:
            deed = {
                "do": order.do,
                "key": None if order.key is None else order.key.hex(),
                "partition": order.partition,
                "offset": order.offset,
                "letters": None if order.letters is None else len(order.letters),
                "who": order.who,
                "at": order.at,
                "id": order.id,
            }
            for name, value in (
                (audit_name(order.id), json.dumps(deed).encode()),
                (order.name, order.encode()),
            ):
                while True:
                    try:
                        producer.produce(
                            self._topic, value, name, partition=order.partition, on_delivery=report
                        )
                    except BufferError:  # a million records wait: the broker is slower than this loop
                        producer.poll(0.1)
                    else:
                        break
                producer.poll(0)
        left = producer.flush(TIMEOUT)
        if left or failed:
            raise KafkaError(
                f"the order could not be written to topic {self._topic!r}: {failed[0] if failed else 'no answer'}"
            )

    def answer(self, order: Order, timeout: float) -> Answer | None:
        """What came of an order; None when no task has answered within ``timeout`` seconds: the app does not run."""
        return self.wait([order], timeout=timeout).answers.get(order.id)

    def wait(
        self,
        orders: Iterable[Order],
        *,
        timeout: float | None = None,
        silence: float | None = None,
        tell: Callable[[int], None] = lambda _answered: None,
    ) -> Heard:
        """Follow these orders until all are answered; ``tell`` is told how many are.

        Ends sooner after ``timeout`` seconds, or when in the first ``silence`` seconds nothing at all came from the
        app. An order whose place another of its kind has taken is answered when that one is.
        """
        began = time.monotonic()
        deadline = inf if timeout is None else began + timeout
        left = {order.id: order for order in orders}
        answers: dict[str, Answer] = {}
        lost: set[str] = set()
        gone: dict[str, float] = {}  # since when they stand no more
        at_first = self._signs()
        while True:
            self._follow()
            now = time.monotonic()
            for asked, order in list(left.items()):
                answer = self._answer(asked) or self._answer(order.id)
                stands = self._state.orders.get((order.partition, order.name))
                if answer is not None:
                    answers[asked] = answer
                    del left[asked]
                elif stands is not None and stands.do == order.do:
                    left[asked] = stands
                    gone.pop(asked, None)
                elif audit_name(order.id) not in self._state.audits:
                    pass  # not read so far: it was given just now
                elif now - gone.setdefault(asked, now) > _GRACE:
                    lost.add(asked)
                    del left[asked]
            tell(len(answers))
            if silence is not None and (answers or self._signs() != at_first):
                silence = None
            if not left or now > deadline or (silence is not None and now - began > silence):
                return Heard(answers=answers, lost=frozenset(lost))
            time.sleep(0.02 if len(left) < 500 else 0.25)

    def _answer(self, order_id: str) -> Answer | None:
        found = self._state.audits.get(audit_name(order_id, done=True))
        if found is None:
            return None
        try:
            said = json.loads(found[1])
            return Answer(
                ok=bool(said["ok"]),
                result=str(said["result"]),
                owner=str(said["owner"]),
                at=float(said["at"]),
            )
        except (ValueError, KeyError, TypeError):
            return None

    def _signs(self) -> object:
        """Of life: what only a running app changes."""
        state = self._state
        said = sum(map(_by_the_app, state.audits))
        redriven = {partition: len(ranges) for partition, ranges in state.redriven.items()}
        return said, redriven, dict(state.lanes), {p: dict(found) for p, found in state.attempts.items()}

    def _follow(self) -> None:
        for _ in range(_AT_A_TIME):
            self._state.poll()


def _by_the_app(name: bytes) -> bool:
    """Whether this record of the audit is about an order that a task has taken: ``audit/<id>/…``."""
    return name.count(b"/") > 1


def new_order(
    do: Deed,
    *,
    partition: int,
    key: bytes | None,
    offset: int = 0,
    letters: Sequence[int] | None = None,
) -> Order:
    """An order by whoever runs this program, now. It is not given yet."""
    return Order(
        do=do,
        partition=partition,
        key=key,
        offset=offset,
        letters=None if letters is None else tuple(letters),
        id=new_id(),
        who=me(),
        at=time.time(),
    )
