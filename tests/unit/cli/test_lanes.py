from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from keylane.cli import lanes
from keylane.cli.main import app, main
from keylane.kafka.settings import KafkaSettings
from keylane.lanes.lane_record import LaneStatus
from keylane.state.admin import AdminClient
from keylane.state.answers import RedriveCounts
from keylane.wording import age
from support.state_log import AT, OWNER, StateLog, stopped

if TYPE_CHECKING:
    from keylane.state.commands import Command

pytestmark = pytest.mark.timeout(20)

QUICK = ("--wait", "0")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> StateLog:
    monkeypatch.setattr(lanes, "_FAILS_AGAIN_SECONDS", 0.05)
    return StateLog(monkeypatch)


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["lanes", *arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout


def facts(*arguments: str, code: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", code=code))


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The sentence of a command that ends with exit code 2."""
    monkeypatch.setattr("sys.argv", ["keylane", "lanes", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    return err


def operator() -> AdminClient:
    return AdminClient(KafkaSettings("nowhere:1"), "chat")


# -- list ----------------------------------------------------------------------------------------------------------


def test_list_shows_which_lanes_have_stopped_and_why(log: StateLog) -> None:
    now = time.time()
    log.stop(stopped(b"young", since=now - 30))
    log.stop(stopped(b"old", since=now - 90_000, partition=2, offset=7, why="its copy could not be written"))
    log.stop(stopped(b"\xff", LaneStatus.PARKED, since=now - 4000))
    log.stop(stopped(None, LaneStatus.SKIPPING, since=now - 5, partition=0))
    shown = run("list", "chat")
    lines = shown.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["KEY", "old", "hex:ff", "young", "-"]
    assert lines[1].split(None, 4)[1:4] == ["blocked", "2@7", "1"]
    assert "1 d 1 h" in lines[1]
    assert "TimeoutError: no answer after 31 ms (its copy could not be written)" in lines[1]
    assert "parked" in lines[2]
    assert "being skipped" in lines[4]
    assert lines[-1] == "2 blocked, 1 parked, 1 being skipped in app 'chat'"


def test_list_as_json(log: StateLog) -> None:
    log.stop(stopped(b"\xff", why="because"))
    log.stop(stopped(None, LaneStatus.PARKED, since=AT + 1))
    with operator() as given:
        order = given.command("release", partition=1, key=b"\xff", offset=100)
    first, second = facts("list", "chat")
    assert first == {
        "key": "hex:ff",
        "state": "blocked",
        "partition": 1,
        "offset": 100,
        "since": AT,
        "stage": "answer",
        "error": "builtins.TimeoutError",
        "message": "no answer after 31 ms",
        "attempts": 2,
        "why": "because",
        "commands": [
            {
                "id": order.id,
                "do": "release",
                "offset": 100,
                "letters": None,
                "who": order.who,
                "at": order.at,
                "reason": None,
            }
        ],
    }
    assert (second["key"], second["state"], second["why"], second["commands"]) == (None, "parked", None, [])


def test_list_says_when_nothing_has_stopped(log: StateLog) -> None:
    assert run("list", "chat") == "no lane of app 'chat' has stopped, and no command is waiting\n"
    assert facts("list", "chat") == []


def test_lanes_list_shows_commands_of_running_lanes_too(log: StateLog) -> None:
    log.stop(stopped(b"k1"))
    log.stop(stopped(None, offset=7))
    with operator() as given:
        given.command("skip", partition=1, key=b"k1", offset=100)
        given.command("redrive", partition=1, key=b"k1", letters=[1])
        given.command("release", partition=1, key=None, offset=7)
        given.command("redrive", partition=0, key=b"k2")
        given.command("redrive", partition=0, key=None)
    shown = run("list", "chat")
    assert "blocked, a command to skip is waiting, a command to redrive is waiting" in shown
    assert "blocked, a command to release is waiting" in shown
    assert "2 blocked, 2 with only a waiting command in app 'chat'" in shown
    lanes = facts("list", "chat")
    assert [(lane["key"], lane["state"], lane["offset"]) for lane in lanes] == [
        ("k1", "blocked", 100),
        (None, "blocked", 7),
        ("k2", None, None),
        (None, None, None),
    ]


def test_list_cuts_a_long_list_but_not_its_json(log: StateLog) -> None:
    for number in range(60):
        log.stop(stopped(b"k%d" % number))
    shown = run("list", "chat", "--limit", "10")
    assert len(shown.splitlines()) == 12
    assert "60 blocked in app 'chat'; 50 not shown (--limit)" in shown
    assert len(facts("list", "chat", "--limit", "10")) == 60


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-5, "0 s"),
        (0.9, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (3725, "1 h 2 min"),
        (90_000, "1 d 1 h"),
        (86_400, "1 d"),
    ],
)
def test_an_age_has_its_two_largest_units(seconds: float, said: str) -> None:
    assert age(seconds) == said


# -- show ----------------------------------------------------------------------------------------------------------


def test_show_prints_a_lane_and_the_next_steps(log: StateLog) -> None:
    log.stop(stopped(b"two words", why="its lane could not be parked: no\x1bboard"))
    with operator() as given:
        log.answer(given.command("release", partition=1, key=b"two words", offset=100))
        given.command("skip", partition=1, key=b"two words", offset=100)
        given.command("redrive", partition=1, key=b"two words", letters=[1, 2])
        given.command("skip", partition=1, key=b"another", offset=100)
    shown = run("show", "chat", "two words")
    for says in (
        "lane       two words, of app chat\n",
        "state      blocked, a command to skip is waiting, a command to redrive is waiting\n",
        "message    1@100 in the source\n",
        r"why        its lane could not be parked: no\x1bboard",
        " in stage answer after 2 attempts\n",
        "error      builtins.TimeoutError: no answer after 31 ms\n",
        "attempts   20",
        ".000  answer, attempt 1: TimeoutError: no answer\n           20",
        "traceback\n  Traceback (most recent call last):\n    File …\n",
        ": skip 1@100, by ",
        ": redrive 2 dead letters, by ",
        f": release 1@100: done, by {OWNER} 0.3 s later\n",
        ": skip 1@100: waiting to be carried out\n",
        "next\n  keylane lanes release chat 'two words'\n      when the cause is fixed",
        "  keylane lanes skip chat 'two words'\n",
    ):
        assert says in shown, shown
    assert shown.count(": skip 1@100: ") == 1


def test_show_as_json(log: StateLog) -> None:
    log.stop(stopped(b"k1", LaneStatus.PARKED))
    with operator() as given:
        log.answer(
            given.command("redrive", partition=1, key=b"k1"),
            RedriveCounts(ok=1, parked=3),
            ok=False,
        )
    found = facts("show", "chat", "k1", "--bootstrap", "elsewhere:1")
    assert (found["app"], found["key"], found["state"], found["failed_at"]) == ("chat", "k1", "parked", AT)
    assert found["failures"][1] == {
        "stage": "answer",
        "attempt": 2,
        "at": AT,
        "error": "TimeoutError: no answer",
    }
    assert found["traceback"].startswith("Traceback")
    assert (found["audit"][0]["do"], found["audit"][0]["answer"]["ok"]) == ("redrive", False)
    assert found["next"] == [
        "keylane dlq list chat --key k1 --letters --bootstrap elsewhere:1",
        "keylane dlq redrive chat --lane k1 --bootstrap elsewhere:1",
    ]


def test_show_finds_a_message_without_a_key_by_its_place(log: StateLog) -> None:
    log.stop(stopped(None, offset=7))
    log.stop(stopped(None, offset=8))
    with operator() as given:
        given.command("release", partition=1, key=None, offset=7)
        given.command("release", partition=1, key=None, offset=8)
        given.command("redrive", partition=1, key=None)
    shown = run("show", "chat", "--at", "1@7")
    assert "lane       a message without a key, of app chat\n" in shown
    assert shown.count(": release 1@7: ") == 1
    assert "keylane lanes release chat --at 1@7\n" in shown
    log.stop(stopped(b"k1", offset=9))
    assert facts("show", "chat", "--at", "1@9")["key"] == "k1"


def test_show_shows_a_key_that_stopped_in_two_partitions_twice(log: StateLog) -> None:
    log.stop(stopped(b"k1"))
    log.stop(stopped(b"k1", partition=2, offset=5))
    assert run("show", "chat", "k1").count("lane       k1, of app chat") == 2
    assert [lane["partition"] for lane in facts("show", "chat", "k1")] == [1, 2]


def test_show_prints_the_history_of_a_resumed_lane(log: StateLog) -> None:
    with operator() as given:
        log.answer(given.command("release", partition=1, key=b"k1", offset=100))
        log.answer(given.command("release", partition=2, key=None, offset=7))
    shown = run("show", "chat", "k1")
    assert "state      not stopped\n" in shown
    assert "release 1@100: done" in shown
    assert "next" not in shown
    assert len(facts("show", "chat", "--at", "2@7")["audit"]) == 1


def test_show_names_no_command_for_a_lane_that_is_being_skipped(log: StateLog) -> None:
    log.stop(stopped(b"k1", LaneStatus.SKIPPING))
    assert facts("show", "chat", "k1")["next"] == []


# -- release and skip ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "done"), [("release", "released"), ("skip", "skipped")])
def test_command_is_given_and_its_result_printed(command: str, done: str, log: StateLog) -> None:
    log.stop(stopped(b"k1"))
    log.app = log.answer
    assert run(command, "chat", "k1") == f"lane k1: {done} by task {OWNER}, 0.3 s later\n"
    (order,) = log.given
    assert (order.do, order.partition, order.key, order.offset) == (command, 1, b"k1", 100)


@pytest.mark.parametrize("command", ["release", "skip"])
def test_an_app_that_does_not_run_carries_it_out_when_it_starts(command: str, log: StateLog) -> None:
    log.stop(stopped(None, offset=7))
    shown = run(command, "chat", "--at", "1@7", *QUICK)
    assert shown == "the app does not seem to be running; it will carry out the command when it starts\n"
    (order,) = log.given
    assert (order.do, order.partition, order.key, order.offset) == (command, 1, None, 7)


def test_open_command_is_awaited_and_not_given_again(log: StateLog) -> None:
    log.stop(stopped(b"k1"))
    run("release", "chat", "k1", *QUICK)
    run("release", "chat", "k1", *QUICK)
    assert len(log.given) == 1
    (told,) = facts("release", "chat", "k1", *QUICK)
    assert told == {
        "key": "k1",
        "partition": 1,
        "offset": 100,
        "do": "release",
        "id": log.given[0].id,
        "waiting": True,
        "answer": None,
        "blocked_again": False,
    }
    assert len(log.given) == 1


def test_release_cancels_an_open_skip_and_says_so(log: StateLog) -> None:
    log.stop(stopped(b"k1"))
    run("skip", "chat", "k1", *QUICK)
    done = CliRunner().invoke(app, ["lanes", "release", "chat", "k1", *QUICK])
    assert f"lane k1: this replaces {log.given[0].who}'s command to skip" in done.stderr
    assert [(order.do, order.withdraws) for order in log.given] == [
        ("skip", ""),
        ("cancel", log.given[0].id),
        ("release", ""),
    ]


def test_released_message_that_fails_again_is_reported(log: StateLog) -> None:
    log.stop(stopped(b"k1"))
    log.stop(stopped(b"k2"))

    def fail_again(order: Command) -> None:
        log.answer(order)
        if order.key == b"k1":
            log.stop(stopped(b"k1", since=time.time()))

    log.app = fail_again
    shown = run("release", "chat", "k1", code=1)
    assert "lane k1: released by task" in shown
    assert "lane k1: blocked again at offset 100: TimeoutError: no answer after 31 ms\n" in shown
    (told,) = facts("release", "chat", "k1", code=1)
    assert told["blocked_again"] is True
    assert "blocked again" not in run("release", "chat", "k2")


def test_unanswered_command_exits_with_1(log: StateLog) -> None:
    log.stop(stopped(b"k1"))

    def refuse(order: Command) -> None:
        log.answer(order, "the lane is not blocked", ok=False)

    log.app = refuse
    shown = run("release", "chat", "k1", code=1)
    assert shown.startswith(f"lane k1: not released, the lane is not blocked; answered by task {OWNER}, ")
    (told,) = facts("release", "chat", "k1", code=1)
    assert (told["answer"]["ok"], told["waiting"]) == (False, False)


def test_all_blocked_lanes_can_be_released_at_once(log: StateLog) -> None:
    for number in range(30):
        log.stop(stopped(b"k%d" % number))
    log.stop(stopped(None, offset=7))
    log.stop(stopped(b"parked", LaneStatus.PARKED))
    log.stop(stopped(b"going", LaneStatus.SKIPPING))
    log.stop(stopped(b"given up"))
    run("skip", "chat", "given up", *QUICK)
    log.given.clear()
    log.app = log.answer
    shown = run("release", "chat", "--all")
    assert len(log.given) == 31
    assert {order.do for order in log.given} == {"release"}
    assert not {b"parked", b"going", b"given up"} & {order.key for order in log.given}
    assert "… 11 more answers" in shown
    assert shown.endswith("31 of 31 lanes released\n")


def test_some_of_all_may_not_answer(log: StateLog) -> None:
    log.stop(stopped(b"k1"))
    log.stop(stopped(b"k2"))
    log.app = lambda order: log.answer(order) if order.key == b"k1" else None
    shown = run("release", "chat", "--all", "--wait", "0.2")
    assert "1 of 2 lanes released\nthe command not answered yet" in shown


def test_all_without_lanes_is_not_an_error(log: StateLog) -> None:
    log.stop(stopped(b"parked", LaneStatus.PARKED))
    assert run("release", "chat", "--all") == "no lane of app 'chat' is blocked\n"
    assert facts("release", "chat", "--all") == []


def test_ctrl_c_leaves_the_command_open(log: StateLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log.stop(stopped(b"k1"))

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(AdminClient, "wait", interrupted)
    done = CliRunner().invoke(app, ["lanes", "release", "chat", "k1"])
    assert (done.exit_code, done.stdout) == (130, "")
    assert done.stderr == "stopped waiting: the command remains, and the app will carry it out\n"
    assert len(log.given) == 1


# -- cancel --------------------------------------------------------------------------------------------------------


def cancelled(log: StateLog, order: Command) -> None:
    """As the task does it."""
    (target,) = (given for given in log.given if given.id == order.withdraws)
    log.answer(target, f"cancelled by {order.who}", ok=False)
    log.answer(order)


def test_cancel_withdraws_the_orders_of_a_lane(log: StateLog) -> None:
    with operator() as given:
        skip = given.command("skip", partition=1, key=b"k1", offset=100)
        redrive = given.command("redrive", partition=1, key=b"k1", letters=[4])
        given.command("skip", partition=1, key=b"k2", offset=101)
    log.app = lambda order: cancelled(log, order)
    assert run("cancel", "chat", "k1") == (
        f"lane k1: skip ({skip.id}) was cancelled\n"
        f"lane k1: redrive 1 dead letter ({redrive.id}) was cancelled\n"
    )
    (told,) = facts("cancel", "chat", "--all")
    assert (told["key"], told["do"], told["offset"], told["cancelled"]) == ("k2", "skip", 101, True)
    assert told["result"] == f"cancelled by {log.given[-1].who}"
    assert run("cancel", "chat", "--all") == "app 'chat' has no waiting command\n"


def test_cancel_that_comes_too_late_is_exit_code_1(log: StateLog) -> None:
    with operator() as given:
        skip = given.command("skip", partition=1, key=None, offset=7)

    def carried_out(order: Command) -> None:
        log.answer(skip)
        log.answer(order, "nothing to do: the order was carried out or cancelled before", ok=False)

    log.app = carried_out
    shown = run("cancel", "chat", "--id", skip.id, code=1)
    assert shown == f"the keyless message at 1@7: skip ({skip.id}) had been carried out before: done\n"


def test_lanes_cancel_takes_effect_when_the_app_starts(log: StateLog) -> None:
    log.stop(stopped(b"k1"))
    with operator() as given:
        given.command("skip", partition=1, key=b"k1", offset=100)
    shown = run("cancel", "chat", "--at", "1@100", *QUICK)
    assert shown.startswith(
        "1 not answered yet: the app does not seem to be running. When it starts, it cancels them before"
    )
    assert run("list", "chat").splitlines()[-1] == "1 blocked in app 'chat'"


# -- audit ---------------------------------------------------------------------------------------------------------


def test_audit_shows_operators_commands_and_results(log: StateLog) -> None:
    assert run("audit", "chat") == "app 'chat' has never been given a command\n"
    with operator() as given:
        given.command("skip", partition=1, key=b"k1", offset=100)
        log.answer(given.command("release", partition=1, key=b"k1", offset=100))
        given.command("release", partition=1, key=None, offset=7)
        given.command("redrive", partition=2, key=b"k2", letters=[4])
        given.command("redrive", partition=2, key=None)
    lines = run("audit", "chat").splitlines()
    assert [line.split()[4] for line in lines[1:]] == ["skip", "release", "release", "redrive", "redrive"]
    for line, says in zip(
        lines[1:],
        (
            "waiting to be carried out",
            f"done, by {OWNER} 0.3 s later",
            "1@7    waiting to be carried out",
            "redrive 1 dead letter",
            "2@-",
        ),
        strict=True,
    ):
        assert says in line
    found = facts("audit", "chat")
    assert found[1] == {
        "id": log.given[1].id,
        "do": "release",
        "key": "k1",
        "partition": 1,
        "offset": 100,
        "letters": None,
        "cancels": None,
        "scope": None,
        "stage": None,
        "who": log.given[1].who,
        "at": log.given[1].at,
        "reason": None,
        "waiting": False,
        "answer": {"ok": True, "result": "done", "owner": OWNER, "at": log.given[1].at + 0.3},
    }
    assert (found[2]["key"], found[2]["offset"], found[3]["letters"]) == (None, 7, 1)


HOSTILE = "\x1b]0;title\x07\x1b[2J\u202e\nlane x: released"


def test_hostile_text_is_shown_escaped(log: StateLog) -> None:
    key = HOSTILE.encode()
    letter = replace(stopped().letter, stage=HOSTILE, error=HOSTILE, message=HOSTILE, traceback=HOSTILE)
    log.stop(replace(stopped(key, why=HOSTILE), letter=letter))
    with operator() as given:
        order = given.command("skip", partition=1, key=key, offset=100)
        forged = json.dumps(
            {**json.loads(log.records[-2].content or b""), "id": HOSTILE, "do": HOSTILE, "who": HOSTILE}
        )
        log.put(1, b"audit/x", forged.encode())
        log.answer(given.command("release", partition=1, key=key, offset=100), HOSTILE, ok=False)
    for command in (["list", "chat"], ["show", "chat", "--at", "1/100"], ["audit", "chat"]):
        shown = run(*command)
        assert not set(shown) & {"\x1b", "\x07", "\u202e"}, command
        assert "\nlane x: released" not in shown
    shown = run("release", "chat", "--at", "1/100", *QUICK)
    assert not set(shown) & {"\x1b", "\x07", "\u202e"}
    shown = run("cancel", "chat", "--id", order.id, *QUICK) if order in operator().open_commands() else ""
    assert not set(shown) & {"\x1b", "\x07", "\u202e"}


# -- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["list", "nobody"], "app 'nobody' never ran at nowhere:1: topic 'nobody.state' does not exist"),
        (["list", "chat", "--bootstrap", ""], "no broker address: pass --bootstrap host:9092"),
        (["list", "chat", "-o", "acks=0"], "--option: expected kafka.NAME=VALUE"),
        (["show", "chat"], "expected one lane: its KEY, or --at PARTITION@OFFSET"),
        (["show", "chat", "k1", "--at", "1@2"], "expected one lane"),
        (
            ["show", "chat", "nobody"],
            "lane nobody of app 'chat' has not stopped, and has never been given a command",
        ),
        (["show", "chat", "--at", "1@99"], "no lane of app 'chat' has stopped at 1@99"),
        (["release", "chat"], "expected one lane"),
        (["release", "chat", "--at", "7"], "such as 3@17 or chat.dlq/3@17, got '7'"),
        (["release", "chat", "hex:zz"], "expected hex digits after 'hex:'"),
        (["release", "chat", "k1", "--all"], "give a lane or --all, not both"),
        (["release", "chat", "k9"], "lane k9 of app 'chat' has not stopped. 'keylane lanes list chat' shows"),
        (["skip", "chat", "--at", "1@99"], "no lane of app 'chat' has stopped at 1@99. 'keylane lanes list"),
        (
            ["release", "chat", "at the park"],
            "lane at the park is parked, not blocked: its messages are among the dead letters. Use: keylane dlq",
        ),
        (["skip", "chat", "at the park"], "Use: keylane dlq redrive chat --lane 'at the park'"),
        (["skip", "chat", "going"], "lane going is being skipped already"),
        (
            ["cancel", "chat"],
            "expected exactly one choice of commands: KEY or --at PARTITION@OFFSET, --id ID, or --all",
        ),
        (["cancel", "chat", "k1", "--all"], "expected exactly one choice of commands"),
        (["cancel", "chat", "k1"], "expected a command for lane k1 that was not carried out, found none"),
        (["cancel", "chat", "--at", "1@7"], "expected a command for the message at 1@7 that was not carried"),
        (["cancel", "chat", "--id", "a1"], "expected command 'a1' that was not carried out, found none"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str],
    says: str,
    log: StateLog,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.stop(stopped(b"k1"))
    log.stop(stopped(b"at the park", LaneStatus.PARKED))
    log.stop(stopped(b"going", LaneStatus.SKIPPING))
    assert says in refused(monkeypatch, capsys, arguments)
    assert log.given == []


@pytest.mark.parametrize(
    ("command", "examples"),
    [("list", 2), ("show", 3), ("release", 3), ("skip", 2), ("cancel", 3), ("audit", 2)],
)
def test_help_teaches_by_example(command: str, examples: int) -> None:
    assert run(command, "--help").count(f"\n  keylane lanes {command} chat") == examples
