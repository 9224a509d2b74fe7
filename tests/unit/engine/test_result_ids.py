from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from keylane.engine.delivery import Delivery
from keylane.engine.result_ids import result_headers
from keylane.testing.log import MemoryRecord


class Letter(MemoryRecord):
    """The message of a dead letter, of a topic with the id "former"."""

    letter = SimpleNamespace(topic_id="former")


@pytest.mark.parametrize(
    ("kind", "headers", "found"),
    [
        (MemoryRecord, [], b"app/id-1/in/0/7"),
        (MemoryRecord, [("event-id", b"")], b"app/id-1/in/0/7"),
        (MemoryRecord, [("event-id", b"e")], b"app/e"),
        (Letter, [], b"app/former/in/0/7"),
    ],
)
def test_result_id_names_the_topic_of_a_position(kind: Any, headers: Any, found: bytes) -> None:
    record = kind(topic="in", partition=0, offset=7, key=b"k", value=b"v", timestamp=0, headers=headers)
    delivery = Delivery(record, cast("Any", SimpleNamespace(source_id="id-1")))
    assert result_headers(delivery, b"app/")[-1] == ("event-id", found)
