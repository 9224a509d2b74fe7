from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane import SettingsError
from keylane.kafka.settings import RESERVED_SETTINGS
from keylane.spark.options import Options


def parse(**given: Any) -> Options:
    return Options.parse({"bootstrap": "localhost:9092", **given}, "chat.in")


def complaint(**given: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        parse(**given)
    return str(caught.value)


@pytest.fixture(autouse=True)
def _no_broker_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEYLANE_BOOTSTRAP", raising=False)


def test_missing_options_have_defaults() -> None:
    options = parse()
    assert (options.settings.bootstrap, dict(options.settings.extra)) == ("localhost:9092", {})
    assert (options.starting, options.epoch, options.tasks, options.outcomes) == (
        "earliest",
        300.0,
        None,
        "failed",
    )
    assert parse(format="parquet").outcomes == "all", "rows are made when somebody reads them"
    assert (options.checkpoint, options.name, options.available_now) == (None, None, False)


def test_options_find_the_broker_in_three_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SettingsError, match=r"no broker given.*KEYLANE_BOOTSTRAP"):
        Options.parse({}, "t")
    monkeypatch.setenv("KEYLANE_BOOTSTRAP", "env:1")
    assert Options.parse({}, "t").settings.bootstrap == "env:1"
    assert Options.parse({"kafka.bootstrap.servers": "spark:2"}, "t").settings.bootstrap == "spark:2"
    assert Options.parse({"bootstrap": "own:3"}, "t").settings.bootstrap == "own:3"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("startingOffset", "startingOffsets"),
        ("startingoffsets", "startingOffsets"),
        ("epochs", "epoch"),
        ("checkpointlocation", "checkpointLocation"),
        ("available_now", "availableNow"),
        ("bootstrap.servers", "kafka.bootstrap.servers"),
    ],
)
def test_an_unknown_option_is_an_error_with_a_near_match(name: str, near: str) -> None:
    assert complaint(**{name: "1"}) == f"unknown option {name!r}; did you mean {near!r}?"


def test_options_unknown_name_lists_the_known_ones() -> None:
    message = complaint(zzz=1)
    assert message.startswith("unknown option 'zzz'. Known: bootstrap")
    assert "kafka.*" in message


@pytest.mark.parametrize(
    "value", [0, -1, "0", "soon", None, "", math.nan, math.inf, "inf", 10**400, True, []]
)
def test_an_epoch_is_a_number_of_seconds(value: Any) -> None:
    assert complaint(epoch=value) == f"option epoch must be a number above 0, got {value!r}"


@pytest.mark.parametrize("value", [-1, "soon", float("inf"), True])
def test_keep_alive_is_a_number_of_seconds(value: Any) -> None:
    assert complaint(keepAlive=value) == f"option keepAlive must be a number from 0 on, got {value!r}"
    assert parse(keepAlive="0").keep_alive == 0
    assert parse().keep_alive == 10


@pytest.mark.parametrize("value", [0, -3, "2.5", 2.7, "many", math.inf, math.nan, True, ""])
def test_tasks_are_a_whole_number(value: Any) -> None:
    assert complaint(tasks=value) == f"option tasks must be a whole number of at least 1, got {value!r}"


@pytest.mark.parametrize(("value", "tasks"), [(4, 4), ("4", 4), (4.0, 4), ("auto", None), (None, None)])
def test_tasks_may_be_text_or_left_to_spark(value: Any, tasks: int | None) -> None:
    assert parse(tasks=value).tasks == tasks


def test_numbers_may_be_text_as_sparks_options_are() -> None:
    assert parse(epoch="0.5").epoch == 0.5


@pytest.mark.parametrize("value", ["none", "failed", "all"])
def test_outcomes_are_one_of_three(value: str) -> None:
    assert parse(outcomes=value).outcomes == value
    assert (
        complaint(outcomes=value.upper())
        == f"option outcomes must be one of all, failed, none, got {value.upper()!r}"
    )


@pytest.mark.parametrize(("value", "meant"), [(True, True), ("true", True), ("False", False), (False, False)])
def test_available_now_is_yes_or_no(value: Any, meant: bool) -> None:
    assert parse(availableNow=value).available_now is meant


def test_available_now_is_nothing_else() -> None:
    assert "option availableNow must be one of true, false, got '1'" in complaint(availableNow=1)


@pytest.mark.parametrize("value", ["earliest", "latest"])
def test_starting_offsets_may_be_a_word(value: str) -> None:
    assert parse(startingOffsets=value).starting == value


def test_starting_offsets_may_be_json_as_for_sparks_kafka_source() -> None:
    text = '{"chat.in": {"0": 23, "1": -2, "2": -1}, "other": {"0": 1}}'
    assert parse(startingOffsets=text).starting == {0: 23, 1: -2, 2: -1}


@pytest.mark.parametrize(
    "value",
    [
        "Earliest",
        "",
        None,
        5,
        "{}",
        "[]",
        "{",
        '{"other": {"0": 1}}',
        '{"chat.in": 5}',
        '{"chat.in": {"zero": 1}}',
        '{"chat.in": {"0": "x"}}',
        '{"chat.in": {"0": null}}',
        '{"chat.in": {"0": 1.5}}',
        '{"chat.in": {"0": Infinity}}',
        '{"chat.in": {"0": true}}',
        '{"chat.in": {"0": -3}}',
        '{"chat.in": {"-1": 3}}',
        {"chat.in": {"0": 1}},
    ],
    ids=repr,
)
def test_options_refuse_malformed_starting_offsets(value: Any) -> None:
    message = complaint(startingOffsets=value)
    assert message.startswith("option startingOffsets must be ")
    assert '{"chat.in": {"0": 23, "1": -2}}' in message


@given(
    st.text(),
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())),
)
def test_options_are_parsed_or_refused_and_never_anything_else(name: str, value: Any) -> None:
    for key in (name, "epoch", "tasks", "outcomes", "availableNow", "startingOffsets"):
        try:
            parse(**{key: value})
        except SettingsError as error:
            assert str(error)  # noqa: PT017 - that it may be raised is all


# kafka.* options.


def test_kafka_options_pass_through_under_librdkafkas_names() -> None:
    settings = parse(**{"kafka.security.protocol": "SSL", "kafka.socket.timeout.ms": 1000}).settings
    assert dict(settings.extra) == {"security.protocol": "SSL", "socket.timeout.ms": "1000"}


@pytest.mark.parametrize("name", sorted(RESERVED_SETTINGS))
def test_options_refuse_settings_that_order_depends_on(name: str) -> None:
    assert (
        complaint(**{f"kafka.{name}": "x"})
        == f"option 'kafka.{name}' cannot be set: {RESERVED_SETTINGS[name]}"
    )


@pytest.mark.parametrize(
    "name",
    [
        "sasl.password",
        "ssl.key.password",
        "ssl.keystore.password",
        "ssl.key.pem",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.assertion.private.key.pem",
        "sasl.oauthbearer.assertion.private.key.passphrase",
    ],
)
def test_secrets_are_not_shown(name: str) -> None:
    options = parse(**{f"kafka.{name}": "hunter2", "kafka.sasl.username": "anna"})
    for shown in (repr(options), repr(options.settings), f"{options.settings}"):
        assert "hunter2" not in shown
        assert "***" in shown
        assert "anna" in shown


def test_a_setting_that_the_client_refuses_is_an_error_in_words() -> None:
    with pytest.raises(SettingsError, match=r"refused its settings.*no.such.thing.*librdkafka's names"):
        parse(**{"kafka.no.such.thing": "1"}).settings.producer()
