from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from keylane.kafka import scribe as scribes
from keylane.kafka.scribe import Scribe

if TYPE_CHECKING:
    import pytest


class Client:
    """A transactional client whose commits take until they are let go."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.over = None
        self.open = False
        self.records: list[bytes] = []
        self.go = threading.Event()

    def begin(self) -> None:
        self.open = True

    def put(self, record: tuple[Any, ...]) -> None:
        self.open = True
        self.records.append(record[1])

    def commit(self, _offsets: list[Any]) -> dict[int, int]:
        self.go.wait(10)
        self.open = False
        return {}


def test_nothing_gets_into_a_transaction_that_is_being_committed_when_its_task_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its progress is taken: a result that came in behind it would be there twice when its message runs again."""
    monkeypatch.setattr(scribes, "Transactions", Client)
    scribe = Scribe(None, "app", "app.state", None, exact=True)  # type: ignore[arg-type]
    client: Any = scribe._client

    async def main() -> None:
        scribe.attach()
        scribe.put("out", b"before", b"k")
        committing = asyncio.ensure_future(scribe.commit())
        await asyncio.sleep(0.05)
        scribe.put("out", b"behind", b"k")
        assert not committing.done()

    asyncio.run(main())  # it ends while the transaction is being committed
    client.go.set()
    assert client.records == [b"before"]
