from __future__ import annotations

import io
import json
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pytest
from rich.console import Console
from typer.testing import CliRunner

from keylane.cli import lag as lag_command
from keylane.cli.arguments import app_name
from keylane.cli.lag_view import shown
from keylane.cli.main import app, main
from keylane.errors import BrokerError, SettingsError
from keylane.kafka.oldest_pending import OldestPending
from keylane.kafka.settings import KafkaSettings
from keylane.lanes.lane_record import LaneStatus, RetryState
from keylane.telemetry import lag_monitor as lag_monitor_module
from keylane.telemetry import source_topic as source
from keylane.telemetry.lag import PartitionLag
from keylane.telemetry.lag_monitor import LagView, PartitionView
from keylane.telemetry.lag_trend import LagMovement, LagTrend, WorkInProgress, pace_of, work_on
from keylane.telemetry.lag_words import facts, reasons
from keylane.telemetry.snapshot import HotFigures, LaneFigures, PartitionFigures
from support.snapshots import histogram, snapshot
from support.state_log import stopped

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from keylane.lanes.lane_record import LaneRecord
    from keylane.telemetry.snapshot import Snapshot

NOW = 10_000.0


def moved(came: int, done: int, lag: int, seconds: float = 2.0) -> LagMovement:
    return LagMovement(seconds=seconds, came=came, done=done, lag=lag)


def judged(movement: LagMovement, **given: Any) -> LagTrend:
    known: dict[str, Any] = {"whole": movement, "runs": True, "held_up": False, "stalled": 0.0, "work": None}
    return pace_of(movement, **known | given)


@pytest.mark.parametrize(
    ("movement", "given", "pace"),
    [
        (moved(0, 0, 0), {}, LagTrend.IDLE),
        (moved(0, 0, 0), {"runs": False}, LagTrend.IDLE),
        (moved(10, 10, 0), {}, LagTrend.KEEPING_UP),
        (moved(0, 5, 0), {"held_up": True}, LagTrend.IDLE),
        (moved(1000, 1000, 50), {}, LagTrend.KEEPING_UP),
        (moved(1000, 990, 60), {}, LagTrend.KEEPING_UP),
        (moved(1000, 500, 5000), {}, LagTrend.FALLING_BEHIND),
        (moved(500, 1000, 5000), {}, LagTrend.CATCHING_UP),
        (moved(0, 1000, 5000), {"stalled": 90.0}, LagTrend.CATCHING_UP),
        (moved(0, 0, 5), {}, LagTrend.KEEPING_UP),
        (moved(0, 0, 5), {"stalled": 29.0}, LagTrend.KEEPING_UP),
        (moved(0, 0, 5), {"stalled": 31.0}, LagTrend.STUCK),
        (moved(0, 0, 5), {"held_up": True}, LagTrend.STUCK),
        (moved(0, 0, 5), {"runs": False}, LagTrend.NOT_RUNNING),
        (moved(0, 0, 5), {"runs": False, "held_up": True}, LagTrend.NOT_RUNNING),
        (moved(2000, 0, 5000), {}, LagTrend.FALLING_BEHIND),
        (moved(0, 0, 5000), {}, LagTrend.FALLING_BEHIND),
        (moved(0, 0, 5000), {"starting": True, "stalled": 40.0}, LagTrend.CATCHING_UP),
        (moved(0, 0, 5000), {"whole": moved(0, 10, 9000)}, LagTrend.CATCHING_UP),
        (moved(0, 0, 5000), {"whole": moved(20, 10, 9000)}, LagTrend.FALLING_BEHIND),
        (moved(0, -50, 50), {"stalled": 40.0}, LagTrend.STUCK),
    ],
)
def test_trend_follows_the_movement(movement: LagMovement, given: dict[str, Any], pace: LagTrend) -> None:
    assert judged(movement, **given) is pace


def told(ago: float = 0.0, *, held: int = 100, stood: float = 0.0, **given: Any) -> Snapshot:
    """A task's record of partition 0, whose watermark has not moved for these seconds."""
    figures = PartitionFigures(
        watermark=100, position=1000, end=1000, held=held, away=0, paused=False, moved=NOW - stood
    )
    known: dict[str, Any] = {
        "began": NOW - 120, "at": NOW - ago, "progressed": NOW, "done": 1200, "partitions": {0: figures},
        "lanes": LaneFigures(all=8, running=8), "processing": histogram(0.1),
    }  # fmt: skip
    return snapshot(**known | given)


def paced(*tasks: Snapshot) -> LagTrend:
    return judged(moved(0, 0, 900), stalled=0.0, work=work_on(0, tasks, NOW))


def test_slow_stage_is_not_stuck() -> None:
    slow = told(stood=40, progressed=NOW - 20, processing=histogram(25.0, 28.0), done=8)
    assert paced(slow) is LagTrend.CATCHING_UP
    hangs = told(stood=100, processing=histogram(25.0, 28.0), done=8, lanes=LaneFigures(running=1))
    assert paced(hangs) is LagTrend.STUCK


def test_first_message_of_a_slow_stage_is_not_stuck() -> None:
    first_one = told(stood=110, progressed=NOW - 110, done=0, processing=histogram())
    assert paced(first_one) is LagTrend.CATCHING_UP
    assert paced(replace(first_one, lanes=LaneFigures(retrying=1))) is LagTrend.STUCK
    assert paced(told(stood=700, progressed=NOW - 700, done=0, processing=histogram())) is LagTrend.STUCK


def test_global_order_leaves_other_partitions_waiting() -> None:
    waits = told(stood=110, order="global", lanes=LaneFigures(all=1, running=1))
    assert paced(waits) is LagTrend.CATCHING_UP
    assert paced(replace(waits, progressed=NOW - 110)) is LagTrend.STUCK


def test_partition_that_was_not_read_yet_waits_for_room() -> None:
    assert paced(told(stood=110, held=0)) is LagTrend.CATCHING_UP


def test_lane_that_waits_for_its_turn_at_a_limit_is_not_stuck() -> None:
    queue = LaneFigures(all=1000, running=1000)  # limit=1 and 100 ms: a round of all lanes takes 100 s
    assert paced(told(stood=100, lanes=queue)) is LagTrend.CATCHING_UP


def test_message_that_hangs_is_stuck_while_others_finish() -> None:
    assert paced(told(stood=40)) is LagTrend.STUCK
    other = replace(told(), partitions={1: told().partitions[0]})
    assert work_on(0, [other], NOW) is None


def test_time_to_catch_up_follows_the_rates() -> None:
    assert moved(100, 300, 1000).catch_up == pytest.approx(10.0)
    assert moved(100, 100, 1000).catch_up is None
    assert moved(100, 0, 0).catch_up == 0


def test_group_without_progress_counts_from_the_log_begin() -> None:
    assert PartitionLag(begin=5, end=9, committed=None).lag == 4
    assert PartitionLag(begin=5, end=9, committed=2).lag == 4
    assert PartitionLag(begin=5, end=9, committed=8).lag == 1
    assert PartitionLag(begin=0, end=3, committed=8).lag == 0  # the topic was created again


def view(*paces: LagTrend, lag: int = 1000, **given: Any) -> LagView:
    partitions = tuple(
        PartitionView(
            partition=number,
            offsets=PartitionLag(begin=0, end=1040 + lag, committed=1040),
            reached=1040,
            movement=moved(100, 50, lag),
            oldest=OldestPending(offset=1040, key=b"k42", at=NOW - 720),
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


def test_lag_shows_malformed_records_of_the_state_topic() -> None:
    found = view(LagTrend.KEEPING_UP, malformed={"lane": 2, "run": 1})
    assert facts("chat", "chat.in", found)["malformed_records"] == {"lane": 2, "run": 1}
    assert "malformed records in the state topic, ignored: lane 2, run 1" in text(found)


def test_stuck_partition_names_its_cause() -> None:
    record = stopped(b"k42", offset=1040, since=NOW - 720, partition=0)
    stuck = first(view(LagTrend.STUCK), blocked=record)
    assert reasons(stuck, stuck.partitions[0]) == ["lane k42 blocked at offset 1040 since 12 min"]

    kept = RetryState(stage="pay", attempt=3, attempts=3, since=NOW - 65, due=0)
    stuck = first(view(LagTrend.STUCK), retried=(1040, kept))
    assert reasons(stuck, stuck.partitions[0]) == [
        "offset 1040 failed in stage pay, retrying for 1 min 5 s, next is attempt 3"
    ]
    stands = moved(0, 0, 1000)
    stuck = first(view(LagTrend.STUCK), movement=stands, stalled=40.0)
    assert reasons(stuck, stuck.partitions[0]) == ["nothing moved past offset 1040 (key k42) for 40 s"]
    work = WorkInProgress(in_flight=3, stalled=40, idle=0, slowest=0.1, patience=30)
    stuck = first(view(LagTrend.STUCK), movement=stands, work=work)
    assert reasons(stuck, stuck.partitions[0]) == [
        "nothing moved past offset 1040 (key k42) for 40 s while other messages finish"
    ]
    figures = PartitionFigures(watermark=1, position=2, end=3, held=1, away=0, paused=True, moved=0.0)
    task = snapshot(
        partitions={0: figures},
        breakers={"pay": "half_open", "send": "closed"},
        hot=(HotFigures(key="k1", partition=0, share=0.61, waiting=5000),),
    )
    behind = view(LagTrend.FALLING_BEHIND, LagTrend.KEEPING_UP, tasks=(task,))
    assert reasons(behind, behind.partitions[0]) == [
        "the breaker of stage pay is half open",
        "key k1 is hot: 61% of its task's messages, 5,000 waiting in its lane",
        "paused: the task's buffer is full",
    ]
    assert reasons(behind, behind.partitions[1]) == []


def test_slow_work_is_named_and_no_key_is_blamed() -> None:
    work = WorkInProgress(in_flight=3, stalled=12, idle=12, slowest=16.0, patience=48)
    slow = first(view(LagTrend.CATCHING_UP), movement=moved(0, 0, 1000), work=work)
    assert reasons(slow, slow.partitions[0]) == [
        "3 messages in flight, none finished in 12 s; the slowest message took 16 s"
    ]


def test_app_that_does_not_run_blames_no_key() -> None:
    gone = view(LagTrend.NOT_RUNNING, LagTrend.NOT_RUNNING, silent=60.0)
    assert reasons(gone, gone.partitions[0]) == [
        "no task of the app is running; the last one was seen 1 min ago"
    ]
    assert "chat on chat.in: not running: last seen 1 min ago, lag 2,000" in text(gone)
    assert facts("chat", "chat.in", gone)["last_seen_seconds"] == 60.0
    empty = first(view(LagTrend.NOT_RUNNING, members=0), movement=moved(0, 0, 1000))
    assert reasons(empty, empty.partitions[0]) == ["the group has no consumer"]


def test_short_look_at_a_group_does_not_call_it_stuck() -> None:
    found = first(view(LagTrend.FALLING_BEHIND), movement=moved(0, 0, 1000))
    assert reasons(found, found.partitions[0]) == [
        (
            "nothing moved past offset 1040 (key k42) in 2 s: too short to tell slow from stuck; "
            "measure longer with --over 60"
        )
    ]


def test_parked_lanes_and_dead_letters_are_in_the_first_line() -> None:
    found = view(LagTrend.IDLE, lag=0, parked=1, blocked=2, dead=4)
    assert "2 lanes blocked, 1 lane parked; 4 dead letters in this epoch" in text(found)
    told = facts("chat", "chat.in", found)
    assert (told["lanes"], told["dead_letters"]) == ({"blocked": 2, "parked": 1}, 4)


def test_open_transactions_do_not_count_as_lag() -> None:
    offsets = PartitionLag(begin=0, end=100, committed=100, hidden=7)
    found = first(view(LagTrend.IDLE, lag=0), offsets=offsets)
    assert (found.lag, found.hidden) == (0, 7)
    assert "7 offsets in open transactions of other producers" in text(found)


@pytest.mark.parametrize("width", [100, 80])
def test_rows_fit_on_one_line_of_a_terminal(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    console.print(
        shown("chat", "chat.in", view(LagTrend.CATCHING_UP, LagTrend.FALLING_BEHIND, lag=1_000_000), width)
    )
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert sum("catching up" in line for line in lines) == 1
    assert sum("falling behind" in line for line in lines) == 2, "the headline, and its row"
    assert any(line.startswith("PARTITION") and line.rstrip().endswith("STATE") for line in lines)


def test_absent_or_slowly_committing_group_is_not_stuck() -> None:
    found = first(view(LagTrend.STUCK), offsets=PartitionLag(begin=0, end=9, committed=None))
    assert reasons(found, found.partitions[0])[0].startswith("the group has no committed offset here")
    later = first(view(LagTrend.IDLE), reached=2040, movement=moved(0, 0, 0))
    assert reasons(later, later.partitions[0]) == [
        "everything up to offset 2040 is done; the next commit moves the group's offset"
    ]


def test_lag_is_a_table_with_details_below() -> None:
    record = stopped(b"k42", offset=1040, since=NOW - 720, partition=0)
    told = text(first(view(LagTrend.STUCK, LagTrend.FALLING_BEHIND), blocked=record))
    assert "chat on chat.in: stuck, lag 2,000, in 100/s, out 50/s over 2 s" in told
    assert "offset 1040, key k42, 12 min old" in told
    assert "never" in told
    assert "partition 0: lane k42 blocked at offset 1040 since 12 min" in told


def test_skew_is_named() -> None:
    found = view(LagTrend.KEEPING_UP, LagTrend.KEEPING_UP, LagTrend.KEEPING_UP, lag=10)
    found = first(found, offsets=PartitionLag(begin=0, end=2000, committed=0))
    assert found.skewed is not None
    assert found.skewed[1] == pytest.approx(2000 / 2020)
    assert "skew: partition 0 has 99% of the lag" in text(found)
    assert view(LagTrend.KEEPING_UP, LagTrend.KEEPING_UP).skewed is None


def test_keys_are_shown_without_control_characters() -> None:
    found = first(view(LagTrend.KEEPING_UP), oldest=OldestPending(offset=1, key=b"\x1b[2Ja[red]b", at=None))
    assert "\x1b" not in text(found)
    long = first(view(LagTrend.KEEPING_UP), oldest=OldestPending(offset=1, key=b"x" * 500, at=None))
    assert "x" * 60 not in text(long)


def test_json_has_the_same_facts() -> None:
    record = stopped(b"k42", offset=1040, since=NOW - 720, partition=0)
    found = facts("chat", "chat.in", first(view(LagTrend.STUCK, LagTrend.KEEPING_UP), blocked=record))
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

    def measure(self) -> LagView | None:
        Watched.looks += 1
        if Watched.looks == 3:
            raise BrokerError("no answer")
        if Watched.looks > 4:
            raise KeyboardInterrupt
        return Watched.found

    def close(self) -> None: ...


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    monkeypatch.setattr(lag_command, "LagMonitor", Watched)
    monkeypatch.setattr(lag_command, "find_source", lambda _settings, _app: "chat.in")
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    monkeypatch.setenv("KEYLANE_BOOTSTRAP", "nowhere:1")
    Watched.looks = 0
    return Watched


@pytest.mark.parametrize(
    ("pace", "code"),
    [
        (LagTrend.IDLE, 0),
        (LagTrend.KEEPING_UP, 0),
        (LagTrend.CATCHING_UP, 0),
        (LagTrend.FALLING_BEHIND, 1),
        (LagTrend.STUCK, 3),
        (LagTrend.NOT_RUNNING, 3),
    ],
)
def test_exit_code_follows_the_trend(watched: type[Watched], pace: LagTrend, code: int) -> None:
    watched.found = view(LagTrend.IDLE, pace)
    done = CliRunner().invoke(app, ["lag", "chat", "--json"])
    assert done.exit_code == code, done.output
    assert json.loads(done.stdout)["state"] == pace.value
    assert watched.asked == ("chat", "chat.in", True)


def test_lag_of_any_group_is_shown(watched: type[Watched]) -> None:
    watched.found = view(LagTrend.IDLE)
    done = CliRunner().invoke(app, ["lag", "--group", "billing", "--topic", "orders"])
    assert done.exit_code == 0, done.output
    assert watched.asked == ("billing", "orders", False)
    assert "billing on orders: idle" in done.stdout


@pytest.mark.parametrize("more", [["--json"], []])
def test_watching_continues_after_a_broker_outage(watched: type[Watched], more: list[str]) -> None:
    watched.found = view(LagTrend.STUCK)
    done = CliRunner().invoke(app, ["lag", "chat", "--watch", *more])
    assert done.exit_code == 0, done.output
    assert "no answer; retrying" in done.output or not more
    assert done.stdout.count("stuck") >= 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "expected an APP, or --group"),
        (["chat", "--group", "g", "--topic", "t"], "expected an APP, or --group"),
        (["--group", "g"], "needs --topic"),
        (["shop_missing:app"], "module 'shop_missing' was not found"),
    ],
)
def test_wrong_usage_is_an_error(
    given: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["keylane", "lag", *given, "--bootstrap", "nowhere:1"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", [["plan"], ["dlq", "list"], ["lanes", "list"], ["verify"], ["metrics"]])
def test_commands_import_a_module_reference(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["keylane", *command, "no_such_shop:app", "--bootstrap", "nowhere:1"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "module 'no_such_shop' was not found" in capsys.readouterr().err


def test_module_reference_names_its_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named_shop.py").write_text("from keylane import App\napp = App('payments', source='in')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    assert app_name("named_shop:app") == "payments"
    assert (app_name("payments"), app_name(None)) == ("payments", None)


# -- looking -------------------------------------------------------------------------------------------------------


class Cluster:
    """A broker's answers: a partition of a group that stays at 100 while the log grows, and telemetry."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.end, self.committed = 1000, 100
        self.started: float | None = None
        self.partitions = 1
        self.told: list[Snapshot] = []
        self.lanes: list[LaneRecord] = []
        broker = self

        class Meter:
            def __init__(self, *_: object, committed: bool) -> None: ...
            def partitions(self) -> dict[int, PartitionLag]:
                one = PartitionLag(begin=0, end=broker.end, committed=broker.committed)
                return dict.fromkeys(range(broker.partitions), one)

        class Heads:
            def __init__(self, *_: object) -> None: ...
            def close(self) -> None: ...
            def read(self, places: dict[int, int]) -> dict[int, OldestPending]:
                return {
                    p: OldestPending(offset=at, key=b"k", at=time.time() - 3600) for p, at in places.items()
                }

        class Operator:
            malformed: ClassVar[dict[str, int]] = {}

            def __init__(self, *_: object) -> None: ...
            def close(self) -> None: ...
            def started(self) -> float | None:
                return broker.started

            def started_by_partition(self) -> dict[int, float]:
                return dict.fromkeys(range(broker.partitions), broker.started or 0.0)

            def lanes(self) -> list[LaneRecord]:
                return broker.lanes

            def attempts(self) -> dict[int, dict[int, RetryState]]:
                return {}

        class Records:
            def __init__(self, *_: object) -> None: ...
            def close(self) -> None: ...
            def catch_up(self, _wait: float) -> list[Snapshot]:
                told, broker.told = broker.told, []
                return told

        for name, made in {
            "LagMeter": Meter,
            "OldestPendingReader": Heads,
            "AdminClient": Operator,
            "TelemetryLog": Records,
        }.items():
            monkeypatch.setattr(lag_monitor_module, name, made)

    def tell(self, watermark: int, ago: float = 0.0, stood: float = 0.0, **given: Any) -> None:
        at = time.time() - ago
        figures = PartitionFigures(
            watermark=watermark,
            position=self.end,
            end=self.end,
            held=9,
            away=0,
            paused=False,
            moved=at - stood,
        )
        known: dict[str, Any] = {"began": at - 100, "at": at, "progressed": at, "partitions": {0: figures}}
        self.told.append(snapshot(**known | given))

    def looked(self, second: Callable[[], None] = lambda: None) -> LagView:
        watch = lag_monitor_module.LagMonitor(KafkaSettings("nowhere:1"), "chat", "chat.in", over=0.2)
        assert watch.measure() is None
        second()
        found = watch.measure()
        watch.close()
        assert found is not None
        return found


def test_tasks_that_commit_later_are_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.tell(500, ago=1)
    found = cluster.looked(lambda: cluster.tell(900))
    assert (found.pace, found.lag) == (LagTrend.KEEPING_UP, 900)
    oldest = found.partitions[0].oldest
    assert oldest is not None
    assert oldest.offset == 900
    assert found.partitions[0].movement.done == 400


def test_message_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.tell(100, stood=50, lanes=LaneFigures(running=3), processing=histogram(0.1), done=1000)
    found = cluster.looked()
    assert found.pace is LagTrend.STUCK
    assert reasons(found, found.partitions[0]) == [
        "nothing moved past offset 100 (key k) for 50 s while other messages finish"
    ]


def test_killed_app_is_not_running_and_never_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    for ago in (1, 4, 6, 9, 11, 60, 3600):  # its last record, written in the middle of its work
        cluster.tell(
            100, ago=ago, stood=1, lanes=LaneFigures(running=3), processing=histogram(0.1), life=str(ago)
        )
        found = cluster.looked()
        assert found.pace is (LagTrend.NOT_RUNNING if ago > 10 else LagTrend.CATCHING_UP), ago
        assert not any("key" in why for why in reasons(found, found.partitions[0])), ago


def test_between_two_epochs_an_app_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.tell(100, ago=2, final=True)
    assert cluster.looked().silent is None
    cluster.tell(100, ago=60, final=True)
    found = cluster.looked()
    assert found.silent == pytest.approx(60, abs=5)
    assert found.pace is LagTrend.NOT_RUNNING


def test_parked_lanes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.committed = cluster.end
    cluster.lanes = [replace(stopped(b"k", offset=5, partition=0), stop=LaneStatus.PARKED)]
    cluster.tell(1000, parked=3, dead=1)
    found = cluster.looked()
    assert (found.pace, found.parked, found.blocked, found.dead) == (LagTrend.IDLE, 1, 0, 4)


def test_app_without_a_plan_is_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Young(Nothing):
        def started(self) -> float:
            return time.time() - 5

    monkeypatch.setattr(source, "AdminClient", Young)
    monkeypatch.setattr(source, "TelemetryLog", Nothing)
    monkeypatch.setenv("KEYLANE_BOOTSTRAP", "nowhere:1")
    done = CliRunner().invoke(app, ["lag", "chat"])
    assert (done.exit_code, "chat is starting: it was started 5 s ago" in done.stdout) == (0, True), (
        done.output
    )
    done = CliRunner().invoke(app, ["lag", "chat", "--json"])
    assert json.loads(done.stdout)["state"] == "starting"
    monkeypatch.setattr(source, "AdminClient", Nothing)  # its topics were made, and it has not taken over yet
    with pytest.raises(source.StartingError, match="chat is starting, or ended before its first epoch"):
        source.find_source(KafkaSettings("nowhere:1"), "chat")


def test_app_that_started_long_ago_needs_its_topic_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(Nothing):
        def started(self) -> float:
            return time.time() - 3600

    monkeypatch.setattr(source, "AdminClient", Old)
    monkeypatch.setattr(source, "TelemetryLog", Nothing)
    with pytest.raises(SettingsError, match="could not find the source topic") as raised:
        source.find_source(KafkaSettings("nowhere:1"), "chat")
    assert not isinstance(raised.value, source.StartingError)


def test_run_without_telemetry_so_far_is_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.tell(100, ago=600)  # the previous run, which was killed
    cluster.started = time.time() - 8
    found = cluster.looked()
    assert (found.pace, found.silent) == (LagTrend.CATCHING_UP, None)
    assert reasons(found, found.partitions[0]) == [
        "the app was started 8 s ago; its tasks have not reported yet"
    ]
    cluster.tell(100, ago=600)
    cluster.started = time.time() - 90
    assert cluster.looked().pace is LagTrend.NOT_RUNNING


def test_slow_work_has_no_time_to_catch_up() -> None:
    work = WorkInProgress(in_flight=3, stalled=12, idle=12, slowest=16.0, patience=48)
    slow = first(view(LagTrend.CATCHING_UP), movement=moved(0, 0, 1000), work=work)
    assert "never" not in text(slow)


class Nothing:
    """A state topic and a telemetry topic without a word."""

    def __init__(self, *_: object) -> None: ...
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...
    def plan(self) -> None: ...
    def started(self) -> float | None:
        return None

    def catch_up(self) -> list[Snapshot]:
        return []


def test_lane_blocked_at_a_later_offset_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.lanes = [stopped(b"late", offset=700, partition=0), stopped(b"later", offset=800, partition=0)]
    cluster.tell(100)
    found = cluster.looked(lambda: setattr(cluster, "committed", 300))
    assert found.pace is LagTrend.CATCHING_UP
    assert found.partitions[0].blocked == cluster.lanes[0]
    cluster.committed = 700
    assert cluster.looked().pace is LagTrend.STUCK


def test_shard_that_does_not_run_is_not_hidden_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)

    cluster.partitions, cluster.started = 2, time.time() - 40
    figures = PartitionFigures(
        watermark=100, position=1000, end=1000, held=9, away=0, paused=False, moved=time.time()
    )
    for ago, pace in ((2, LagTrend.CATCHING_UP), (8, LagTrend.NOT_RUNNING), (13, LagTrend.NOT_RUNNING)):
        cluster.tell(
            100, shard="1/2", run="one", life="one", lanes=LaneFigures(running=3), processing=histogram(0.1)
        )
        cluster.tell(
            100,
            ago=ago,
            shard="2/2",
            run="two",
            life="two",
            partitions={1: figures},
            lanes=LaneFigures(running=3),
            processing=histogram(0.1),
        )
        found = cluster.looked()
        assert [one.pace for one in found.partitions] == [LagTrend.CATCHING_UP, pace], ago
