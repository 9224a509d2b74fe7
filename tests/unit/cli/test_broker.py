from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from keylane.broker import registry
from keylane.broker.config import Address
from keylane.broker.process import Process
from keylane.broker.registry import BrokerRecord, NodeRecord
from keylane.cli.broker import _bytes, _duration, app

pytestmark = pytest.mark.timeout(20)

GONE = Process(pid=os.getpid(), started="another time")


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYLANE_STATE", str(tmp_path / "state"))


def note(
    broker: str, data: Path, process: Process, owner: Process | None = None, folder: str | None = "here"
) -> None:
    started_from = str(Path.cwd()) if folder == "here" else folder
    nodes = (NodeRecord(address=Address(node=1, port=21000, controller_port=21001), process=process),)
    registry.save(
        BrokerRecord(
            id=broker,
            data=data / broker,
            temporary=True,
            keep=False,
            heap="512m",
            settings={},
            started=1000.0,
            owner=owner,
            nodes=nodes,
            command_folder=None if owner is not None else started_from,
        )
    )


def refused(*args: str) -> str:
    """Runs a command that must fail as commands fail: a sentence on stderr, exit code 2, nothing on stdout."""
    result = CliRunner().invoke(app, list(args))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("keylane: ")
    return result.stderr


def test_stop_without_an_id_lists_the_brokers_if_several_run(tmp_path: Path) -> None:
    note("kone", tmp_path, Process.current())
    note("ktwo", tmp_path, Process.current())
    message = refused("stop")
    assert "several brokers were started from this folder: kone (127.0.0.1:21000, from " in message
    assert ", ktwo (127.0.0.1:21000, from " in message


def test_stop_without_an_id_leaves_brokers_of_other_folders(tmp_path: Path) -> None:
    note("kfar", tmp_path, Process.current(), folder="/elsewhere")
    message = refused("stop")
    assert "no running broker was started from this folder" in message
    assert "kfar (127.0.0.1:21000, from /elsewhere)" in message
    assert [record.id for record in registry.load_all()] == ["kfar"]


def test_detached_broker_of_a_program_is_never_stopped_unnamed(tmp_path: Path) -> None:
    note("kprog", tmp_path, Process.current(), folder=None)
    assert "no running broker was started with" in refused("stop")
    assert CliRunner().invoke(app, ["stop", "--all", "--json"]).stdout == "[]\n"
    assert [record.id for record in registry.load_all()] == ["kprog"]


def test_stop_without_an_id_leaves_a_programs_broker_alone(tmp_path: Path) -> None:
    note("kmine", tmp_path, Process.current(), owner=Process.current())
    assert "no running broker was started with" in refused("stop")
    assert CliRunner().invoke(app, ["stop", "--all", "--json"]).stdout == "[]\n"


def test_stop_says_how_to_clean_up_dead_brokers_and_all_does_it(tmp_path: Path) -> None:
    note("kdead", tmp_path, GONE)
    assert "dead: kdead" in refused("stop")
    assert CliRunner().invoke(app, ["stop", "--all"]).exit_code == 0
    assert registry.load_all() == ()


def test_an_id_and_all_is_refused() -> None:
    assert "not both" in refused("stop", "kone", "--all")


def test_an_unknown_id_is_refused() -> None:
    assert "broker 'kwrong' does not exist" in refused("stop", "kwrong")
    assert "broker 'kwrong' does not exist" in refused("status", "kwrong")


def test_a_dead_broker_has_no_uptime(tmp_path: Path) -> None:
    note("kdead", tmp_path, GONE)
    (facts,) = json.loads(CliRunner().invoke(app, ["status", "--json"]).stdout)
    assert (facts["state"], facts["uptime_seconds"], facts["nodes"][0]["alive"]) == ("dead", None, False)
    assert "dead" in CliRunner().invoke(app, ["status"]).stdout


def test_without_brokers_status_says_how_to_start_one() -> None:
    assert "keylane broker start" in CliRunner().invoke(app, ["status"]).stdout


def test_an_impossible_heap_is_refused_before_anything_starts() -> None:
    assert "expected a heap of at least 128m" in refused("start", "--heap", "tiny")


@pytest.mark.parametrize("command", ["start", "stop", "status"])
def test_help_teaches_by_example(command: str) -> None:
    assert f"keylane broker {command}" in CliRunner().invoke(app, [command, "--help"]).stdout


def test_durations_and_sizes_are_short() -> None:
    assert [_duration(each) for each in (5, 125, 7500, 260_000)] == ["5 s", "2 min", "2 h 5 min", "3 d"]
    assert [_bytes(each) for each in (0, 118_784, 45_000_000, 2_000_000_000)] == [
        "0 B",
        "118.8 kB",
        "45.0 MB",
        "2.0 GB",
    ]
