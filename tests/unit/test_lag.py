from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from keylane.cli import lag as lag_command
from keylane.cli.lag_view import facts, reasons, shown
from keylane.cli.main import app, main
from keylane.core.pace import Movement, Pace, pace_of
from keylane.core.record import Kept
from keylane.core.telemetry import HotFigures, LaneFigures, PartitionFigures
from keylane.errors import KafkaError
from keylane.kafka import lag_watch
from keylane.kafka.heads import Head
from keylane.kafka.lag import PartitionLag
from keylane.kafka.lag_watch import LagView, PartitionView
from keylane.kafka.settings import KafkaSettings
from snapshots import snapshot
from statelog import stopped

if TYPE_CHECKING:
    from collections.abc import Callable

    from keylane.core.record import LaneRecord
    from keylane.core.telemetry import Snapshot

NOW = 10_000.0


def moved(came: int, done: int, lag: int, seconds: float = 2.0) -> Movement:
    return Movement(seconds=seconds, came=came, done=done, lag=lag)


@pytest.mark.parametrize(
    ("movement", "oldest", "held_up", "pace"),
    [
        (moved(0, 0, 0), None, False, Pace.IDLE),
        (moved(10, 10, 0), None, False, Pace.KEEPING_UP),
        (moved(0, 5, 0), None, True, Pace.IDLE),
        (moved(1000, 1000, 50), 0.1, False, Pace.KEEPING_UP),
        (moved(1000, 990, 60), 0.1, False, Pace.KEEPING_UP),
        (moved(1000, 500, 5000), 3.0, False, Pace.FALLING_BEHIND),
        (moved(500, 1000, 5000), 3.0, False, Pace.CATCHING_UP),
        (moved(0, 1000, 5000), 90.0, False, Pace.CATCHING_UP),
        (moved(0, 0, 5), 1.0, False, Pace.KEEPING_UP),
        (moved(0, 0, 5), None, False, Pace.KEEPING_UP),
        (moved(0, 0, 5), 31.0, False, Pace.STUCK),
        (moved(0, 0, 5), 1.0, True, Pace.STUCK),
        (moved(2000, 0, 5000), 1.0, False, Pace.FALLING_BEHIND),
        (moved(0, 0, 5, seconds=60.0), 45.0, False, Pace.KEEPING_UP),
        (moved(0, -50, 50), 40.0, False, Pace.STUCK),
    ],
)
def test_the_pace_in_words(movement: Movement, oldest: float | None, held_up: bool, pace: Pace) -> None:
    assert pace_of(movement, oldest=oldest, held_up=held_up) is pace


def test_the_time_to_catch_up() -> None:
    assert moved(100, 300, 1000).catch_up == pytest.approx(10.0)
    assert moved(100, 100, 1000).catch_up is None
    assert moved(100, 0, 0).catch_up == 0


def test_a_group_without_progress_counts_from_the_beginning_of_the_log() -> None:
    assert PartitionLag(begin=5, end=9, committed=None).lag == 4
    assert PartitionLag(begin=5, end=9, committed=2).lag == 4
    assert PartitionLag(begin=5, end=9, committed=8).lag == 1
    assert PartitionLag(begin=0, end=3, committed=8).lag == 0  # the topic was made anew


def view(*paces: Pace, lag: int = 1000, **given: Any) -> LagView:
    partitions = tuple(
        PartitionView(
            partition=number,
            offsets=PartitionLag(begin=0, end=1040 + lag, committed=1040),
            reached=1040,
            movement=moved(100, 50, lag),
            oldest=Head(offset=1040, key=b"k42", at=NOW - 720),
            pace=pace,
            blocked=None,
            retried=None,
        )
        for number, pace in enumerate(paces)
    )
    return replace(LagView(at=NOW, partitions=partitions, tasks=(), silent=None), **given)


def first(found: LagView, **given: Any) -> LagView:
    return replace(found, partitions=(replace(found.partitions[0], **given), *found.partitions[1:]))


def text(found: LagView) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(shown("chat", "chat.in", found))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_what_a_partition_is_stuck_on() -> None:
    record = stopped(b"k42", offset=1040, since=NOW - 720, partition=0)
    stuck = first(view(Pace.STUCK), blocked=record)
    assert reasons(stuck, stuck.partitions[0]) == ["lane k42 blocked at offset 1040 since 12 min"]

    kept = Kept(stage="pay", attempt=3, attempts=3, since=NOW - 65, due=0)
    stuck = first(view(Pace.STUCK), retried=(1040, kept))
    assert reasons(stuck, stuck.partitions[0]) == [
        "offset 1040 failed in stage pay, is retried since 1 min 5 s, attempt 3 is next"
    ]
    stuck = view(Pace.STUCK, silent=60.0)
    assert reasons(stuck, stuck.partitions[0]) == ["no task of the app runs; the last one spoke 1 min ago"]
    stuck = view(Pace.STUCK)
    assert reasons(stuck, stuck.partitions[0]) == ["nothing moved past offset 1040 (key k42) in 2 s"]
    figures = PartitionFigures(watermark=1, position=2, end=3, held=1, away=0, paused=True)
    task = snapshot(
        partitions={0: figures},
        breakers={"pay": "half_open", "send": "closed"},
        hot=(HotFigures(key="k1", partition=0, share=0.61, waiting=5000),),
    )
    behind = view(Pace.FALLING_BEHIND, Pace.KEEPING_UP, tasks=(task,))
    assert reasons(behind, behind.partitions[0]) == [
        "the breaker of stage pay is half open",
        "key k1 is hot: 61% of what its task reads, 5,000 wait in its lane",
        "paused: the task has no room for more of it",
    ]
    assert reasons(behind, behind.partitions[1]) == []


def test_a_group_that_is_not_there_and_one_that_commits_later_are_told_apart_from_a_stuck_one() -> None:
    found = first(view(Pace.STUCK), offsets=PartitionLag(begin=0, end=9, committed=None))
    assert reasons(found, found.partitions[0])[0].startswith("the group has no offset here")
    later = first(view(Pace.IDLE), reached=2040, movement=moved(0, 0, 0))
    assert reasons(later, later.partitions[0]) == [
        "all is done, up to offset 2040; the group's offset follows with the next commit"
    ]


def test_it_is_shown_as_a_table_with_what_is_known_below() -> None:
    record = stopped(b"k42", offset=1040, since=NOW - 720, partition=0)
    told = text(first(view(Pace.STUCK, Pace.FALLING_BEHIND), blocked=record))
    assert "chat on chat.in: stuck, lag 2,000, in 100/s, out 50/s over 2 s" in told
    assert "offset 1040, key k42, 12 min old" in told
    assert "never" in told
    assert "partition 0: lane k42 blocked at offset 1040 since 12 min" in told


def test_skew_is_named() -> None:
    found = view(Pace.KEEPING_UP, Pace.KEEPING_UP, Pace.KEEPING_UP, lag=10)
    found = first(found, offsets=PartitionLag(begin=0, end=2000, committed=0))
    assert found.skewed is not None
    assert found.skewed[1] == pytest.approx(2000 / 2020)
    assert "skew: partition 0 has 99% of the lag" in text(found)
    assert view(Pace.KEEPING_UP, Pace.KEEPING_UP).skewed is None


def test_keys_that_would_move_the_cursor_do_not() -> None:
    found = first(view(Pace.KEEPING_UP), oldest=Head(offset=1, key=b"\x1b[2Ja[red]b", at=None))
    assert "\x1b" not in text(found)
    long = first(view(Pace.KEEPING_UP), oldest=Head(offset=1, key=b"x" * 500, at=None))
    assert "x" * 60 not in text(long)


def test_json_has_the_same() -> None:
    record = stopped(b"k42", offset=1040, since=NOW - 720, partition=0)
    found = facts("chat", "chat.in", first(view(Pace.STUCK, Pace.KEEPING_UP), blocked=record))
    assert json.loads(json.dumps(found)) == found
    assert (found["state"], found["lag"], found["catch_up_seconds"]) == ("stuck", 2000, None)
    assert found["why"] == ["lane k42 blocked at offset 1040 since 12 min"]
    assert found["partitions"][0]["oldest"] == {"offset": 1040, "key": "k42", "age_seconds": 720.0}


# -- the command ---------------------------------------------------------------------------------------------------


class Watched:
    """Instead of a broker."""

    found: LagView | None = None
    asked: tuple[str, str, bool]
    looks = 0

    def __init__(self, _settings: KafkaSettings, group: str, topic: str, *, app: bool, over: float) -> None:
        Watched.asked = group, topic, app
        assert over > 0

    def look(self) -> LagView | None:
        Watched.looks += 1
        if Watched.looks == 3:
            raise KafkaError("no answer")
        if Watched.looks > 4:
            raise KeyboardInterrupt
        return Watched.found

    def close(self) -> None: ...


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    monkeypatch.setattr(lag_command, "LagWatch", Watched)
    monkeypatch.setattr(lag_command, "find_source", lambda _settings, _app: "chat.in")
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    monkeypatch.setenv("KEYLANE_BOOTSTRAP", "nowhere:1")
    Watched.looks = 0
    return Watched


@pytest.mark.parametrize(
    ("pace", "code"),
    [(Pace.IDLE, 0), (Pace.KEEPING_UP, 0), (Pace.CATCHING_UP, 0), (Pace.FALLING_BEHIND, 1), (Pace.STUCK, 3)],
)
def test_the_exit_code_says_how_it_is(watched: type[Watched], pace: Pace, code: int) -> None:
    watched.found = view(Pace.IDLE, pace)
    done = CliRunner().invoke(app, ["lag", "chat", "--json"])
    assert done.exit_code == code, done.output
    assert json.loads(done.stdout)["state"] == pace.value
    assert watched.asked == ("chat", "chat.in", True)


def test_any_group_can_be_asked_about(watched: type[Watched]) -> None:
    watched.found = view(Pace.IDLE)
    done = CliRunner().invoke(app, ["lag", "--group", "billing", "--topic", "orders"])
    assert done.exit_code == 0, done.output
    assert watched.asked == ("billing", "orders", False)
    assert "billing on orders: idle" in done.stdout


@pytest.mark.parametrize("more", [["--json"], []])
def test_watching_goes_on_when_the_broker_was_away(watched: type[Watched], more: list[str]) -> None:
    watched.found = view(Pace.STUCK)
    done = CliRunner().invoke(app, ["lag", "chat", "--watch", *more])
    assert done.exit_code == 0, done.output
    assert "no answer; asked again" in done.output or not more
    assert done.stdout.count("stuck") >= 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "say whose lag"),
        (["chat", "--group", "g", "--topic", "t"], "say whose lag"),
        (["--group", "g"], "needs --topic"),
    ],
)
def test_wrong_usage_is_told(
    given: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["keylane", "lag", *given, "--bootstrap", "nowhere:1"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert said in capsys.readouterr().err


# -- looking -------------------------------------------------------------------------------------------------------


class Cluster:
    """What a broker would answer: a partition of a group that stands at 100 while the log grows, and telemetry."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.end, self.committed = 1000, 100
        self.told: list[Snapshot] = []
        self.lanes: list[LaneRecord] = []
        broker = self

        class Meter:
            def __init__(self, *_: object) -> None: ...
            def partitions(self) -> dict[int, PartitionLag]:
                return {0: PartitionLag(begin=0, end=broker.end, committed=broker.committed)}

        class Heads:
            def __init__(self, *_: object) -> None: ...
            def close(self) -> None: ...
            def read(self, places: dict[int, int]) -> dict[int, Head]:
                return {p: Head(offset=at, key=b"k", at=time.time() - 3600) for p, at in places.items()}

        class Operator:
            def __init__(self, *_: object) -> None: ...
            def close(self) -> None: ...
            def lanes(self) -> list[LaneRecord]:
                return broker.lanes

            def attempts(self) -> dict[int, dict[int, Kept]]:
                return {}

        class Records:
            def __init__(self, *_: object) -> None: ...
            def close(self) -> None: ...
            def catch_up(self, _wait: float) -> list[Snapshot]:
                told, broker.told = broker.told, []
                return told

        for name, made in {
            "LagMeter": Meter,
            "Heads": Heads,
            "Operator": Operator,
            "TelemetryLog": Records,
        }.items():
            monkeypatch.setattr(lag_watch, name, made)

    def tell(self, watermark: int, ago: float = 0.0, **given: Any) -> None:
        at = time.time() - ago
        figures = PartitionFigures(
            watermark=watermark, position=self.end, end=self.end, held=0, away=0, paused=False
        )
        self.told.append(snapshot(began=at - 100, at=at, partitions={0: figures}, **given))

    def looked(self, second: Callable[[], None] = lambda: None) -> LagView:
        watch = lag_watch.LagWatch(KafkaSettings("nowhere:1"), "chat", "chat.in", over=0.2)
        assert watch.look() is None
        second()
        found = watch.look()
        watch.close()
        assert found is not None
        return found


def test_tasks_that_commit_later_are_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.tell(500, ago=1)
    found = cluster.looked(lambda: cluster.tell(900))
    assert (found.pace, found.lag) == (Pace.KEEPING_UP, 900)
    oldest = found.partitions[0].oldest
    assert oldest is not None
    assert oldest.offset == 900
    assert found.partitions[0].movement.done == 400


def test_without_any_movement_an_old_message_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.tell(100, lanes=LaneFigures(running=3))
    found = cluster.looked()
    assert found.pace is Pace.STUCK
    assert reasons(found, found.partitions[0]) == [
        "nothing moved past offset 100 (key k) in 0 s while others go on"
    ]


def test_between_two_epochs_an_app_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.tell(100, ago=2, final=True)
    assert cluster.looked().silent is None
    cluster.tell(100, ago=60, final=True)
    found = cluster.looked()
    assert found.silent == pytest.approx(60, abs=5)
    assert found.pace is Pace.STUCK


def test_a_lane_that_is_blocked_further_on_holds_up_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.lanes = [stopped(b"late", offset=700, partition=0), stopped(b"later", offset=800, partition=0)]
    cluster.tell(100)
    found = cluster.looked(lambda: setattr(cluster, "committed", 300))
    assert found.pace is Pace.CATCHING_UP
    assert found.partitions[0].blocked == cluster.lanes[0]
    cluster.committed = 700
    assert cluster.looked().pace is Pace.STUCK
