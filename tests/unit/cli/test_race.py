"""The race's judge, and an app with another order than its own."""

from __future__ import annotations

import json
import logging

import pytest
from typer.testing import CliRunner

from keylane import App, Message, VersionOrdering
from keylane.cli.main import app as cli
from keylane.demo.race import Track, duration, make_app
from keylane.errors import SettingsError
from keylane.spark.packaging import AppPackage, pack
from keylane.spark.source import _level


def track(order: str, finished: list[int], keys: int = 2) -> Track:
    made = Track(order, len(finished))  # type: ignore[arg-type]
    for place, number in enumerate(finished):
        said = {"n": number, "started": 100.0 + place, "finished": 101.5 + place}
        made.see(b"k%d" % (number % keys), json.dumps(said).encode())
    return made


def test_race_judge_counts_overtaking_and_concurrency() -> None:
    found = track("none", [1, 0, 3, 2, 4])
    assert (found.overtaken, found.overtaken_in_key) == (2, 0)
    assert found.at_once == 2
    assert found.seconds == pytest.approx(5.5)
    assert found.per_second == pytest.approx(5 / 5.5)
    assert [one.number for one in found.trace] == [1, 0, 3, 2, 4]


def test_clock_starts_with_the_first_message_in_the_handler() -> None:
    """Four keys and 20 ms: 4 lanes at once do 200 messages a second, whenever they were sent."""
    found = Track("key", 40)
    for number in range(40):
        start = 1000.0 + number // 4 * 0.02
        said = {"n": number, "started": start, "finished": start + 0.02}
        found.see(b"k%d" % (number % 4), json.dumps(said).encode())
    assert found.began == 1000.0
    assert found.per_second == pytest.approx(200)


def test_live_trace_shows_the_last_messages() -> None:
    found = track("none", list(range(100)))
    assert [one.number for one in found.recent] == list(range(84, 100))
    assert [one.number for one in found.trace] == list(range(60))


@pytest.mark.parametrize(
    ("order", "finished", "sound"),
    [
        ("none", [3, 2, 1, 0], True),
        ("key", [1, 0, 3, 2], True),
        ("key", [2, 0, 1, 3], False),
        ("global", [0, 1, 2, 3], True),
        ("global", [1, 0, 2, 3], False),
    ],
)
def test_each_ordering_is_judged_by_its_promise(order: str, finished: list[int], sound: bool) -> None:
    assert track(order, finished).sound is sound


def test_a_race_with_results_missing_or_twice_is_not_sound() -> None:
    assert not Track("none", 3).sound
    twice = track("none", [0, 1])
    twice.see(b"k0", json.dumps({"n": 0, "started": 1.0, "finished": 2.0}).encode())
    assert (twice.done, twice.doubles, twice.sound) == (2, 1, False)


def test_the_same_message_waits_as_long_in_every_app() -> None:
    assert duration("race-7") == duration("race-7")
    assert all(0.5 <= duration(f"race-{n}") <= 1.5 for n in range(100))
    assert make_app("global", 0.01).spec.order.name == "global"


@pytest.mark.parametrize(
    "arguments", [["--messages", "0"], ["--keys", "500"], ["--work-ms", "0"], ["--messages", "90000"]]
)
def test_a_race_that_cannot_be_run_is_refused(arguments: list[str]) -> None:
    assert isinstance(CliRunner().invoke(cli, ["race", *arguments]).exception, SettingsError)


def test_an_app_gets_another_order_for_a_run_and_keeps_its_own() -> None:
    app = App("shop", source="in", order="key")

    @app.stage
    async def work(msg: Message) -> bytes:
        return bytes(msg.value)

    package = pack(app.spec)
    opened = AppPackage(pickled=package.pickled, order="partition").open()
    assert (opened.order.name, app.spec.order.name) == ("partition", "key")
    assert [stage.name for stage in opened.stages] == ["work"]
    assert app.with_order("none").spec.order.name == "none"


@pytest.mark.parametrize(
    ("app", "order", "said"),
    [
        (App("shop", source="in"), "global", "on_failure='skip'"),
        (App("shop", source="in", on_failure="park"), "partition", "on_failure='park'"),
        (App("shop", source="in", versions=VersionOrdering()), "none", "versions= needs order='key'"),
        (App("shop", source="in"), "rows", "must be 'key', 'partition', 'global' or 'none'"),
    ],
)
def test_ordering_that_does_not_fit_the_app_is_refused(app: App, order: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said.replace("(", r"\(")):
        app.with_order(order)  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "level"), [("", "INFO"), ("error", "ERROR"), ("loud", "INFO")])
def test_environment_sets_the_tasks_log_level(
    given: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYLANE_LOG", given)
    assert logging.getLevelName(_level()) == level
