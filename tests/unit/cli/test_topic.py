"""``keylane topic``: its output and exit codes. Creating topics is tested with a broker."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from keylane.cli import topic as module
from keylane.cli.main import app
from keylane.errors import SettingsError


class Cluster:
    """One with the topic ``there``."""

    def __init__(self, _settings: object) -> None:
        self.found = {"there": 2, "__consumer_offsets": 50}

    def topics(self) -> dict[str, int]:
        return self.found

    def create(self, topic: str, partitions: int, config: dict[str, str], *, replication: int) -> bool:
        assert replication == -1
        assert config in ({}, {"retention.ms": "1000"})
        self.found[topic] = partitions
        return True


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Cluster", Cluster)


def call(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["topic", *arguments, "--bootstrap", "nowhere:1"], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_create_lists_created_topics() -> None:
    assert call("create", "a", "b", "--partitions", "1", "--config", "retention.ms=1000") == (
        "created topic a with 1 partition\ncreated topic b with 1 partition\n"
    )


def test_create_refuses_a_topic_that_exists() -> None:
    with pytest.raises(SettingsError, match="'there' exists already, with 2 partitions; nothing was created"):
        call("create", "new", "there")


def test_create_if_not_exists_leaves_a_topic_as_it_is() -> None:
    told = call("create", "there", "new", "--partitions", "4", "--if-not-exists")
    assert told == (
        "topic there exists, with 2 partitions, not 4; left unchanged\ncreated topic new with 4 partitions\n"
    )
    told = call("create", "there", "--partitions", "2", "--if-not-exists", "--json")
    assert json.loads(told) == {"topic": "there", "created": False, "partitions": 2}


def test_create_explains_a_malformed_setting() -> None:
    with pytest.raises(SettingsError, match=r"--config: expected NAME=VALUE, such as .*, got 'retention'"):
        call("create", "new", "--config", "retention")


def test_list_leaves_out_topics_of_kafka() -> None:
    assert "__consumer" not in call("list")
    assert json.loads(call("list", "--json")) == [{"topic": "there", "partitions": 2}]
    assert "__consumer_offsets" in call("list", "--all")
