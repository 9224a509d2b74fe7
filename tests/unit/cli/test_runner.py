"""``keylane run`` without Spark: its actions before the first start, and before the next."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from keylane import App
from keylane.cli import runner as module
from keylane.cli.layout import StatusLine, say
from keylane.cli.progress import bar
from keylane.cli.run import _conclude
from keylane.cli.runner import RunEnd, Runner
from keylane.errors import BrokerError, SettingsError
from keylane.kafka.settings import KafkaSettings
from keylane.spark import jvm
from keylane.spark.query import dead_letters
from keylane.telemetry.lag import GroupLag

if TYPE_CHECKING:
    from collections.abc import Callable


class Steps(list[str]):
    """The calls, in their order."""

    def of(self, name: str, answer: Any = None) -> Callable[..., Any]:
        def called(*_given: Any, **_more: Any) -> Any:
            self.append(name)
            return answer

        return called


def run(monkeypatch: pytest.MonkeyPatch, failures: int) -> tuple[Steps, RunEnd]:
    """One run whose first starts fail, and whose app then cannot be started at all."""
    steps = Steps()

    def start(*_given: Any, **_more: Any) -> None:
        steps.append("start")
        if steps.count("start") > failures:
            raise SettingsError("the end of this test")
        raise BrokerError("a broker was away for a moment")

    cluster = SimpleNamespace(prepare=steps.of("prepare"))
    monkeypatch.setattr(module, "Cluster", lambda _settings: cluster)
    monkeypatch.setattr(module, "remember_newest_run", steps.of("remember"))
    monkeypatch.setattr(module, "check_still_ours", steps.of("check"))
    monkeypatch.setattr(module, "start", start)
    monkeypatch.setattr(jvm, "end", lambda: True)
    monkeypatch.setattr(jvm, "is_alive", lambda _spark: True)
    monkeypatch.setattr(jvm, "await_idle", lambda _spark, _seconds: True)
    monkeypatch.setattr(Runner, "_session", lambda _self: SimpleNamespace())
    monkeypatch.setattr("keylane.spark.supervisor.FIRST_WAIT_SECONDS", 0.0)
    lag = GroupLag(committed=0, end=0)
    progress = SimpleNamespace(begin=lambda: None, first=lag, end=lambda: lag)
    monkeypatch.setattr(module, "RunProgress", lambda *_given, **_more: progress)
    stopper: Any = SimpleNamespace(asked=False, runs=lambda *_given, **_more: None, nothing_runs=lambda: None)
    app = App("shop", source="orders")
    package: Any = None
    made = Runner(
        app.spec,
        KafkaSettings("nowhere:1"),
        package,
        {},
        master="local[1]",
        stopper=stopper,
        console=Console(quiet=True),
    )
    return steps, made.run()


@pytest.mark.parametrize("failures", [0, 1, 3])
def test_newest_run_is_remembered_before_the_first_start(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    steps, result = run(monkeypatch, failures)
    assert steps == ["prepare", "remember", *["start", "check"] * failures, "start"]
    assert result.failure is not None
    assert result.failure.line == "the end of this test"


def last_words(**given: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    known: dict[str, Any] = {"ended": "caught up", "seconds": 9.4, "processed": 1000, "lag": 0}
    _conclude(console, "shop", "host:1", RunEnd(**known | given), quiet=False)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "caught up: 1,000 messages done in 9.4 s, lag 0\n"),
        ({"processed": 1}, "caught up: 1 message done in 9.4 s, lag 0\n"),
        ({"dead_letters": 10}, "lag 0, 10 dead letters (keylane dlq list shop)\n"),
        (
            {"dead_letters": 1, "parked_lanes": 1},
            "lag 0, 1 dead letter (keylane dlq list shop), 1 lane parked (keylane lanes list shop)\n",
        ),
        ({"hidden": 2}, "lag 0; 2 offsets in open transactions of other producers\n"),
        (
            {"stopped_lanes": 1, "lag": 3},
            "not everything is done: 1 lane stopped and waiting for an operator.",
        ),
    ],
)
def test_last_line_names_what_needs_attention(given: dict[str, Any], said: str) -> None:
    assert said in last_words(**given)


def test_dead_letters_are_counted_over_epochs() -> None:
    rows: list[Any] = [{"keylane": {"dead": 2, "parked": 1}}, {}, {"keylane": {"dead": 4, "parked": None}}]
    query: Any = SimpleNamespace(recentProgress=[{"observedMetrics": row} for row in rows])
    assert dead_letters(query) == 7


def test_run_until_caught_up_shows_a_bar_and_the_time_left() -> None:
    assert bar(300, 1000, 100.0, 95.0) == "━━━━━━╸               30%  300 of 1,000, 95/s, about 7 s left"
    assert bar(0, 1000, 0.0, 0.0).endswith("  0%  0 of 1,000, 0/s")
    assert bar(1200, 1000, 100.0, 95.0) == "━━━━━━━━━━━━━━━━━━━━ 100%  1,200 of 1,000, 95/s"


def test_status_line_leaves_the_cursor_at_its_start() -> None:
    """What another process writes next replaces the line, and is not glued to its end."""
    console = Console(file=io.StringIO(), force_terminal=True, width=40)
    with StatusLine(console, "waiting …") as line:
        line.update("0 done, 0/s, lag 30,000" + " " * 50)
        shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.endswith("\r")
    assert len(shown.rpartition("\x1b[2K")[2].rstrip("\r")) < 40
    say(console, "an event")
    assert console.file.getvalue().endswith("\r\x1b[2Kan event\n")  # type: ignore[attr-defined]
    quiet = Console(file=io.StringIO(), width=40)
    with StatusLine(quiet, "waiting …"):
        assert quiet.file.getvalue() == ""  # type: ignore[attr-defined]
