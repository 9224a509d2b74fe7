from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from keylane.broker import Broker, BrokerState, EmbeddedBrokerError, registry
from keylane.broker.config import Address
from keylane.broker.folder import open_folder
from keylane.broker.process import Process
from keylane.broker.registry import BrokerRecord, NodeRecord

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(20)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYLANE_STATE", str(tmp_path / "state"))


def ended() -> Process:
    """A process that was there a moment ago."""
    running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process(pid=running.pid, started=Process.current().started)
    running.communicate(b"\n")
    return process


def test_secured_broker_is_remembered(tmp_path: Path) -> None:
    address = Address(node=1, port=21000, controller_port=21001, certificate_port=21002)
    written = replace(
        record(tmp_path, Process.current()), secure=True, nodes=(NodeRecord(address=address, process=None),)
    )
    registry.save(written)
    assert registry.load("ktest1") == written


def record(
    data: Path, process: Process | None, owner: Process | None = None, *, keep: bool = False
) -> BrokerRecord:
    return BrokerRecord(
        id="ktest1",
        data=data,
        temporary=True,
        keep=keep,
        heap="512m",
        settings={"num.partitions": "3"},
        started=1000.0,
        owner=owner,
        nodes=(NodeRecord(address=Address(node=1, port=21000, controller_port=21001), process=process),),
    )


def test_saved_record_is_loaded_unchanged(tmp_path: Path) -> None:
    written = record(tmp_path, Process.current(), Process.current())
    registry.save(written)
    assert registry.load("ktest1") == written
    assert registry.load_all() == (written,)
    registry.remove("ktest1")
    assert registry.load("ktest1") is None


def test_broker_with_a_running_process_is_running(tmp_path: Path) -> None:
    registry.save(record(tmp_path, Process.current()))
    (found,) = Broker.list()
    assert (found.id, found.state, found.bootstrap) == ("ktest1", BrokerState.RUNNING, "127.0.0.1:21000")
    assert found.nodes[0].pid == os.getpid()


def test_dead_broker_is_listed_and_removed_by_stop(tmp_path: Path) -> None:
    data = open_folder(tmp_path / "data", broker="ktest1", nodes=1).path
    registry.save(record(data, ended()))
    (found,) = Broker.list()
    assert found.state is BrokerState.DEAD
    found.stop()
    assert Broker.list() == ()
    assert not data.exists()


def test_reused_process_id_is_not_the_broker(tmp_path: Path) -> None:
    stranger = replace(Process.current(), started="another time")
    registry.save(record(tmp_path, stranger))
    found = Broker.find("ktest1")
    assert found.state is BrokerState.DEAD
    found.nodes[0].kill()  # must not hit us


def test_broker_without_a_process_is_dead(tmp_path: Path) -> None:
    registry.save(record(tmp_path, None))
    assert Broker.find("ktest1").state is BrokerState.DEAD


@pytest.mark.parametrize("keep", [False, True])
def test_leftovers_of_a_killed_program_are_removed(tmp_path: Path, keep: bool) -> None:
    data = open_folder(tmp_path / "data", broker="ktest1", nodes=1).path
    registry.save(record(data, ended(), owner=ended(), keep=keep))
    assert Broker.list() == ()
    assert data.exists() == keep


def test_damaged_broker_file_is_ignored(tmp_path: Path) -> None:
    registry.save(record(tmp_path, Process.current()))
    registry.path("kother").write_text('{"id": "kother"}')
    assert [found.id for found in Broker.list()] == ["ktest1"]


def test_unknown_id_is_an_error_with_the_known_ids(tmp_path: Path) -> None:
    registry.save(record(tmp_path, Process.current()))
    with pytest.raises(EmbeddedBrokerError, match=r"broker 'kwrong' does not exist \(known: ktest1\)"):
        Broker.find("kwrong")
