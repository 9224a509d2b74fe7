from __future__ import annotations

import logging
from typing import Any

import pytest

from keylane.kafka.settings import KafkaSettings
from keylane.offsets.offset_runs import OffsetRuns
from keylane.state.admin import AdminClient
from keylane.state.labels import DLQ, SOURCE, Labels
from keylane.state.topic import REDRIVEN, StateTopic
from keylane.testing import MemoryRecord
from support.state_log import LABELS, StateLog, identity, stopped

pytestmark = pytest.mark.timeout(20)

SETTINGS = KafkaSettings("nowhere:1")
OLD = Labels(identity(topic_id="id-0"))

OF_SOURCE = [
    b"progress",
    b"epoch",
    b"former",
    b"range/0-63",
    b"grouped",
    b"attempts",
    b"attempts/0-63",
    b"version/k",
    b"lane/k",
    b"keyless/7",
    b"load",
    b"load/0-63",
    b"rest",
    b"command/message/a1",
]
OF_DLQ = [b"redriven", b"redriven/0-63", b"command/letters/a1"]
OF_APP = [
    b"run",
    b"plan",
    b"owner/x",
    b"command/plan",
    b"command/cancel/a1",
    b"command/stop",
    b"command/guard",
    b"audit/x",
    b"audit/x/done",
]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> StateLog:
    return StateLog(monkeypatch)


def record(name: bytes, headers: Any) -> Any:
    return MemoryRecord(topic="chat.state", partition=0, offset=5, key=name, value=b"v", headers=headers)


@pytest.mark.parametrize(
    ("names", "header"), [(OF_SOURCE, SOURCE), (OF_DLQ, DLQ), (OF_APP, None)], ids=["source", "dlq", "app"]
)
def test_labels_name_the_topic_of_a_records_offsets(names: list[bytes], header: str | None) -> None:
    for name in names:
        labels = dict(LABELS.of(name))
        assert (header in labels) if header else not labels, name
        assert LABELS.accepts(name, record(name, LABELS.of(name)))


@pytest.mark.parametrize(
    "written",
    [
        identity(topic_id="id-0"),
        identity(source="other.in", dlq="other.dlq"),
        None,
    ],
    ids=["recreated", "renamed", "unlabelled"],
)
def test_labels_refuse_records_of_another_topic(written: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    labels = Labels(identity())
    for name in [*OF_SOURCE, *OF_DLQ]:
        headers = [] if written is None else Labels(written).of(name)
        assert not labels.accepts(name, record(name, headers)), name
    for name in OF_APP:
        assert labels.accepts(name, record(name, [])), name
    assert labels.foreign["attempts"] == 2
    lines = [line for line in caplog.messages if "kind=attempts" in line]
    assert len(lines) == 1
    assert "expected=c1/id-1/chat.in" in lines[0]
    if written is not None:
        assert f"found={written.source}" in lines[0]


def test_operator_shows_no_lanes_of_a_recreated_source(log: StateLog) -> None:
    old, new = stopped(b"old"), stopped(b"new")
    log.put(1, old.name, old.encode(), OLD.of(old.name))
    log.stop(new)
    with AdminClient(SETTINGS, "chat") as operator:
        assert [lane.key for lane in operator.lanes()] == [b"new"]


def test_operator_ignores_redriven_marks_of_a_recreated_dlq(log: StateLog) -> None:
    log.put(1, REDRIVEN, OffsetRuns([0]).encode(), OLD.of(REDRIVEN))
    with AdminClient(SETTINGS, "chat") as operator:
        assert not operator.redriven()
        log.redriven(1, 4)
        assert operator.redriven() == {1: OffsetRuns([4])}


def test_state_drops_a_record_that_a_foreign_one_replaced(log: StateLog) -> None:
    """Compaction removes the older one sooner or later: what is known must not depend on when."""
    lane = stopped(b"k")
    log.stop(lane)
    log.put(1, lane.name, lane.encode(), OLD.of(lane.name))
    with AdminClient(SETTINGS, "chat") as operator:
        assert operator.lanes() == []


def test_state_without_an_identity_takes_no_offsets(log: StateLog, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    log.stop(stopped(b"k"))
    log.put(0, b"run", b'{"run": "r2", "who": "host:1", "at": 1.0}')
    state = StateTopic(SETTINGS, "chat", "chat.state", range(3), "r1", labels=Labels(None))
    state.restore()
    assert not state.lanes
    assert state.runs[0]["run"] == "r2"
    assert not caplog.messages
