"""Claims against a state topic in memory; the clock jumps instead of waiting. With a broker: tests/integration."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from keylane.errors import BrokerError
from keylane.kafka import transactional_client
from keylane.offsets.slots import ALL
from keylane.state import fences, ownership
from keylane.state.hidden_claims import HiddenClaims
from keylane.state.ownership import Ownership
from keylane.state.topic import Claim

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def claim_of(who: str, place: int, run: str = "r") -> Claim:
    return Claim(place, ALL, run, who, leaving=False, heard=0.0)


class Broker:
    """One partition's owners, what of the log can be read, and a clock that moves while somebody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.topic = "app.state"
        self.owners: dict[int, dict[str, Claim]] = {0: {}}
        self.successor = None
        self.readable = True
        self.end = 10
        self.waiting: list[tuple[str, bytes | None, int]] = []  # committed, but not readable
        self.fenced: Counter[str] = Counter()
        self.aborted: list[tuple[str, list[Any]]] = []
        self.hidden = HiddenClaims()
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        for module in (ownership, fences):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(fences, "Cluster", lambda _settings: self)
        monkeypatch.setattr(fences, "read_hidden_claims", lambda *_: self.hidden)
        monkeypatch.setattr(fences, "end_hanging_transaction", self.end_hanging)
        for module in (ownership, fences, transactional_client):
            for name in ("fence", "transactional_producer"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, lambda _settings, owner, *_: self.fence(owner))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 2000, "nobody waits that long"

    # What a claim needs of the settings, the writer and the view of the topic.

    bootstrap = "here:9092"
    id = "app.new"
    limits: Mapping[str, int] = {}
    source = ""

    def consumer(self, _app: str) -> Any:
        return SimpleNamespace(consumer_group_metadata=lambda: "group", close=lambda: None)

    @property
    def written(self) -> dict[int, int]:
        return {0: self.end}

    def write_blocking(self, records: Iterable[tuple[int, bytes, bytes | None]]) -> None:
        for _, name, value in records:
            self.end += 1
            self.waiting.append((name.removeprefix(b"owner/").decode(), value, self.end))
        self.poll()

    def poll(self) -> bool:
        if self.readable:
            for owner, value, place in self.waiting:
                if value is None:
                    self.owners[0].pop(owner, None)
                else:
                    self.owners[0][owner] = claim_of(json.loads(value)["who"], place)
            self.waiting = []
        return False

    def read_through(self, _places: Mapping[int, int], timeout: float) -> bool:
        self.poll()
        if not self.readable:
            self.sleep(timeout)
        return self.readable

    def fence(self, owner: str) -> Any:
        self.fenced[owner] += 1
        return SimpleNamespace()

    def end_hanging(self, _settings: Any, owner: str, places: Any, *_: Any) -> None:
        self.aborted.append((owner, list(places)))

    def claim(self) -> bool:
        new = Ownership(self, "app", self, self, "r", "new", 20)  # type: ignore[arg-type]
        return new.claim({0: ALL})


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    return Broker(monkeypatch)


def test_dead_owner_is_fenced_once_and_its_claim_deleted(broker: Broker) -> None:
    broker.owners[0]["app.old"] = claim_of("old", 3)
    assert not broker.claim()
    assert broker.fenced == {"app.old": 1}
    assert list(broker.owners[0]) == ["app.new"]


def test_claim_behind_an_open_transaction_ends_with_its_place(broker: Broker) -> None:
    """The claim is never readable, whatever is fenced: before, it fenced four times a second for ever."""
    broker.owners[0]["app.old"] = claim_of("old", 3)
    broker.readable = False
    broker.hidden = HiddenClaims(starts={0: 7})
    with pytest.raises(BrokerError) as raised:
        broker.claim()
    assert broker.fenced == {"app.old": 1}
    assert broker.aborted == [("app.old", [("app.state", 0)])]
    text = str(raised.value)
    assert "app.state/0 from offset 7" in text
    assert "app.old" in text
    assert "kafka-transactions.sh --bootstrap-server here:9092 abort --topic app.state --partition 0" in text
    assert "--start-offset 7" in text


def test_claim_without_an_answer_ends_without_advice(broker: Broker) -> None:
    broker.readable = False
    with pytest.raises(BrokerError, match="gives no answer"):
        broker.claim()
    assert not broker.fenced


def test_owner_whose_claim_is_hidden_is_fenced_once(broker: Broker) -> None:
    broker.readable = False
    hidden = {"app.killed": claim_of("killed", 5), "app.later": claim_of("later", 99)}
    broker.hidden = HiddenClaims(starts={0: 5}, claims={0: hidden})

    def fence(owner: str) -> Any:
        broker.fenced[owner] += 1
        broker.readable, broker.hidden = True, HiddenClaims()

    broker.fence = fence  # type: ignore[method-assign]
    assert not broker.claim()
    assert broker.fenced == {"app.killed": 1}


def test_owner_is_fenced_again_for_a_later_claim_only(broker: Broker) -> None:
    """What it wrote before the fence may become readable after it; that is another claim."""
    broker.owners[0]["app.old"] = claim_of("old", 3)
    writes = broker.write_blocking

    def write_blocking(records: Iterable[tuple[int, bytes, bytes | None]]) -> None:
        writes(records)
        if broker.fenced["app.old"] == 1:
            broker.owners[0]["app.old"] = claim_of("old", 4)

    broker.write_blocking = write_blocking  # type: ignore[method-assign]
    assert not broker.claim()
    assert broker.fenced == {"app.old": 2}
