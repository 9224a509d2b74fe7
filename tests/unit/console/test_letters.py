"""What a request may ask of the dead letters."""

from __future__ import annotations

from typing import Any

import pytest

from keylane.console.hub import APPS_MAX, Hub, apps_of
from keylane.console.letters import LetterDesk, query_of
from keylane.dlq.record import DeadLetterKind
from keylane.errors import SettingsError
from keylane.kafka.settings import KafkaSettings


def test_query_is_read_from_a_request() -> None:
    given = {
        "key": "hex:00ff",
        "stage": "a",
        "error": "B",
        "since": "10",
        "until": "20.5",
        "kind": "dead",
        "cause": "3",
    }
    found = query_of({**given, "redriven": "1"})
    assert (found.key, found.stage, found.error, found.cause) == (b"\x00\xff", "a", "B", 3)
    assert (found.since, found.until, found.kind, found.redriven) == (10.0, 20.5, DeadLetterKind.DEAD, True)
    empty = query_of(dict.fromkeys(given, ""))
    assert empty == query_of({})
    assert empty.where()[1] == []


@pytest.mark.parametrize(
    "given",
    [
        {"since": "yesterday"},
        {"since": "nan"},
        {"until": "1e300"},
        {"since": "-1"},
        {"kind": "other"},
        {"cause": "x"},
        {"cause": "-1"},
        {"key": "hex:zz"},
        {"cause": ["1"]},
        {"kind": {"a": 1}},
    ],
)
def test_wrong_query_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        query_of(given)


@pytest.fixture
def desk() -> LetterDesk:
    return LetterDesk(Hub(KafkaSettings("localhost:1")))


def test_redrive_by_filter_says_what_and_how(desk: LetterDesk) -> None:
    way, what, cli = desk.way("chat", {"stage": "a b", "since": 0})
    assert not way.whole
    assert what == "dead letters with stage a b, of a span of time"
    assert cli == (
        "keylane dlq redrive chat --stage 'a b' --since 1970-01-01T00:00:00Z --bootstrap localhost:1"
    )
    assert desk.way("chat", {})[2] == "keylane dlq redrive chat --all --bootstrap localhost:1"


def test_redrive_of_a_lane_takes_all_of_it(desk: LetterDesk) -> None:
    way, what, cli = desk.way("chat", {"lane": "$(rm -rf)"})
    assert (way.whole, way.key) == (True, b"$(rm -rf)")
    assert what == "all dead letters of lane $(rm -rf)"
    assert "--lane '$(rm -rf)'" in cli


def test_redrive_of_single_letters_names_them(desk: LetterDesk) -> None:
    way, what, cli = desk.way("chat", {"positions": ["1@2", "0@7"]})
    assert way.places == {(1, 2), (0, 7)}
    assert what == "2 dead letters: 0@7, 1@2"
    assert cli == "keylane dlq redrive chat 0@7 1@2 --bootstrap localhost:1"


@pytest.mark.parametrize("positions", [[], ["x"], ["1@"], ["1@2; rm"], [3], "1@2"])
def test_wrong_positions_are_refused(desk: LetterDesk, positions: Any) -> None:
    with pytest.raises(SettingsError):
        desk.way("chat", {"positions": positions})


def test_apps_are_known_by_their_topics() -> None:
    topics = ["b.state", "b.dlq", "a.state", "a.dlq", "c.state", "d.dlq", ".state", ".dlq", "a.in"]
    assert apps_of(topics) == ["a", "b"]
    assert APPS_MAX >= 10
