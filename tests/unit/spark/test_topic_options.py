from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict

from keylane import SettingsError
from keylane.kafka.offset_resolver import EARLIEST, LATEST
from keylane.kafka.settings import RESERVED_SETTINGS
from keylane.spark.topic_options import TopicOptions


def parse(stream: bool = False, /, **given: Any) -> TopicOptions:
    """As Spark hands them over: names in lower case."""
    named = {"kafka.bootstrap.servers": "localhost:9092", "subscribe": "t", **given}
    kept = {name: value for name, value in named.items() if value}
    return TopicOptions.parse(CaseInsensitiveDict(kept), stream=stream)


def complaint(stream: bool = False, /, **given: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        parse(stream, **given)
    return str(caught.value)


@pytest.fixture(autouse=True)
def _no_broker_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEYLANE_BOOTSTRAP", raising=False)


def test_topic_options_default_offsets_of_table_and_stream() -> None:
    table, stream = parse(), parse(True)
    assert (table.starting.at, table.ending.at) == (EARLIEST, LATEST)
    assert stream.starting.at == LATEST
    assert (table.committed, table.fail_on_loss, table.headers) == (True, True, False)
    assert (table.min_partitions, table.max_per_trigger) == (None, None)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("startingOffset", "startingOffsets"),
        ("topic", None),
        ("subscribes", "subscribe"),
        ("includeHeader", "includeHeaders"),
        ("failOnLoss", "failOnDataLoss"),
        ("maxOffsetPerTrigger", "maxOffsetsPerTrigger"),
        ("bootstrap.servers", "kafka.bootstrap.servers"),
    ],
)
def test_an_unknown_option_is_an_error_with_a_near_match(name: str, near: str | None) -> None:
    told = complaint(**{name: "1"})
    assert told.startswith(f"unknown option {name.lower()!r}")
    assert f"did you mean {near!r}?" in told if near else "Known: bootstrap" in told


def test_path_is_not_a_topic() -> None:
    assert "set the topic with the option 'subscribe'" in complaint(path="/data")


def test_the_address_may_come_from_the_driver() -> None:
    assert TopicOptions.parse({"subscribe": "t"}, stream=False, bootstrap="b:1").settings.bootstrap == "b:1"
    with pytest.raises(SettingsError, match="no broker address"):
        TopicOptions.parse({"subscribe": "t"}, stream=False)


def test_topic_options_pass_client_settings_to_the_client() -> None:
    options = parse(
        **{"kafka.client.id": "me", "kafka.isolation.level": "read_uncommitted", "kafka.group.id": "g"}
    )
    assert dict(options.settings.extra) == {"client.id": "me"}
    assert (options.committed, options.group) == (False, "g")
    assert "must be read_committed" in complaint(**{"kafka.isolation.level": "dirty"})
    for name in RESERVED_SETTINGS:
        if name != "group.id":
            assert "cannot be set" in complaint(**{f"kafka.{name}": "1"})


def test_which_topics_is_said_once() -> None:
    assert parse(subscribe=" a, b,a ").selection.topics == ("a", "b")
    assert parse(subscribe="", subscribePattern="a.*").selection.pattern == "a.*"
    assert parse(subscribe="", assign='{"a": [2, 0]}').selection.places == (("a", 0), ("a", 2))
    assert "no topic: set the option" in complaint(subscribe="")
    assert "exclude each other" in complaint(assign='{"a": [0]}')
    assert "must name a topic" in complaint(subscribe=" , ")
    assert "must be a regular expression" in complaint(subscribe="", subscribePattern="a(")


@pytest.mark.parametrize(
    "value", ["[]", "{}", '{"a": 1}', '{"a": ["0"]}', '{"a": [-1]}', '{"a": [true]}', "a"]
)
def test_assign_is_json(value: str) -> None:
    assert 'must be {"topic": [0, 2]}' in complaint(subscribe="", assign=value)


@pytest.mark.parametrize(
    "value",
    [
        "0",
        "soon",
        '{"t": 1}',
        '{"t": {"0": "1"}}',
        '{"t": {"x": 1}}',
        '{"t": {"0": -3}}',
        '{"t": {"-1": 3}}',
        "[1]",
    ],
)
@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
def test_offsets_are_words_or_json(option: str, value: str) -> None:
    assert complaint(**{option: value}).startswith(f"option {option} must be earliest, latest or JSON")


def test_offsets_and_times_for_each_partition() -> None:
    options = parse(startingOffsets='{"t": {"0": 23, "1": -2}}', endingTimestamp="99")
    assert options.starting.at == {("t", 0): 23, ("t", 1): EARLIEST}
    assert (options.ending.at, options.ending.times, options.ending.or_latest) == (99, True, True)
    timed = parse(startingOffsetsByTimestamp='{"t": {"0": 5}}', startingOffsetsByTimestampStrategy="latest")
    assert (timed.starting.at, timed.starting.or_latest) == ({("t", 0): 5}, True)
    assert "milliseconds" in complaint(startingTimestamp="yesterday")
    assert "milliseconds" in complaint(startingOffsetsByTimestamp='{"t": {"0": -1}}')
    assert "must be error or latest" in complaint(startingOffsetsByTimestampStrategy="zero")
    assert "exclude each other" in complaint(startingOffsets="earliest", startingTimestamp="1")


def test_a_table_that_could_have_no_rows_is_a_mistake() -> None:
    assert "has no rows" in complaint(startingOffsets="latest")
    assert "has no rows" in complaint(startingOffsets='{"t": {"0": -1}}')
    assert "has no rows" in complaint(endingOffsets="earliest")


def test_options_of_the_other_kind_are_refused() -> None:
    assert "is not valid for a stream" in complaint(True, endingOffsets="latest")
    assert "is not valid for a table" in complaint(maxOffsetsPerTrigger="5")
    assert parse(True, maxOffsetsPerTrigger="5").max_per_trigger == 5


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5"])
def test_numbers_and_answers(value: Any) -> None:
    assert "whole number of at least 1" in complaint(minPartitions=value)
    assert "must be true or false" in complaint(failOnDataLoss=value)
    assert "must be true or false" in complaint(includeHeaders=value)
