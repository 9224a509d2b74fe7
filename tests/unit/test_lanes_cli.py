from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from keylane.cli.layout import age
from keylane.cli.main import app, main
from keylane.core.record import Stop
from keylane.kafka.operator import Operator
from keylane.kafka.settings import KafkaSettings
from statelog import AT, OWNER, StateLog, stopped

if TYPE_CHECKING:
    from keylane.kafka.orders import Order

pytestmark = pytest.mark.timeout(20)

QUICK = ("--wait", "0")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> StateLog:
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


def operator() -> Operator:
    return Operator(KafkaSettings("nowhere:1"), "chat")


# -- list ----------------------------------------------------------------------------------------------------------


def test_list_shows_which_lanes_have_stopped_and_why(log: StateLog) -> None:
    now = time.time()
    log.stop(stopped(b"young", since=now - 30))
    log.stop(stopped(b"old", since=now - 90_000, partition=2, offset=7, why="its copy could not be written"))
    log.stop(stopped(b"\xff", Stop.PARKED, since=now - 4000))
    log.stop(stopped(None, Stop.SKIPPING, since=now - 5, partition=0))
    shown = run("list", "chat")
    lines = shown.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["KEY", "old", "hex:ff", "young", "-"]
    assert lines[1].split(None, 4)[1:4] == ["blocked", "2/7", "1"]
    assert "1 d 1 h" in lines[1]
    assert "TimeoutError: no answer after 31 ms (its copy could not be written)" in lines[1]
    assert "parked" in lines[2]
    assert "being skipped" in lines[4]
    assert lines[-1] == "2 blocked, 1 parked, 1 being skipped in app 'chat'"


def test_list_as_json(log: StateLog) -> None:
    log.stop(stopped(b"\xff", why="because"))
    log.stop(stopped(None, Stop.PARKED, since=AT + 1))
    with operator() as given:
        order = given.order("release", partition=1, key=b"\xff")
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
        "orders": [{"id": order.id, "do": "release", "letters": None, "who": order.who, "at": order.at}],
    }
    assert (second["key"], second["state"], second["why"], second["orders"]) == (None, "parked", None, [])


def test_list_says_when_nothing_has_stopped(log: StateLog) -> None:
    assert run("list", "chat") == "no lane of app 'chat' has stopped, and no order stands\n"
    assert facts("list", "chat") == []


def test_list_shows_standing_orders_also_of_lanes_that_have_not_stopped(log: StateLog) -> None:
    log.stop(stopped(b"k1"))
    log.stop(stopped(None, offset=7))
    with operator() as given:
        given.order("skip", partition=1, key=b"k1")
        given.order("redrive", partition=1, key=b"k1", letters=[1])
        given.order("release", partition=1, key=None, offset=7)
        given.order("redrive", partition=0, key=b"k2")
        given.order("redrive", partition=0, key=None)
    shown = run("list", "chat")
    assert "blocked, an order to skip stands, an order to redrive stands" in shown
    assert "blocked, an order to release stands" in shown
    assert "2 blocked, 2 for which only an order stands in app 'chat'" in shown
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


def test_show_tells_all_about_a_lane_and_what_to_do_next(log: StateLog) -> None:
    log.stop(stopped(b"two words", why="its lane could not be parked: no\x1bboard"))
    with operator() as given:
        log.answer(given.order("release", partition=1, key=b"two words"))
        given.order("skip", partition=1, key=b"two words")
        given.order("redrive", partition=1, key=b"two words", letters=[1, 2])
        given.order("skip", partition=1, key=b"another")
    shown = run("show", "chat", "two words")
    for says in (
        "lane       two words, of app chat\n",
        "state      blocked, an order to skip stands, an order to redrive stands\n",
        "message    1/100 in the source\n",
        r"why        its lane could not be parked: no\x1bboard",
        " in stage answer after 2 attempts\n",
        "error      builtins.TimeoutError: no answer after 31 ms\n",
        "attempts   20",
        ".000  answer, attempt 1: TimeoutError: no answer\n           20",
        "traceback\n  Traceback (most recent call last):\n    File …\n",
        "orders     to skip, by ",
        "           to redrive 2 letters, by ",
        f": release: done, by {OWNER} 0.3 s later\n",
        ": skip: the order stands\n",
        "next\n  keylane lanes release chat 'two words'\n      when the cause is mended",
        "  keylane lanes skip chat 'two words'\n",
    ):
        assert says in shown, shown
    assert shown.count(": skip: ") == 1


def test_show_as_json(log: StateLog) -> None:
    log.stop(stopped(b"k1", Stop.PARKED))
    with operator() as given:
        log.answer(
            given.order("redrive", partition=1, key=b"k1"),
            "1 through, 0 dead again, 3 still parked",
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
        given.order("release", partition=1, key=None, offset=7)
        given.order("release", partition=1, key=None, offset=8)
        given.order("redrive", partition=1, key=None)
    shown = run("show", "chat", "--at", "1/7")
    assert "lane       a message without a key, of app chat\n" in shown
    assert shown.count(": release: ") == 1
    assert "keylane lanes release chat --at 1/7\n" in shown
    log.stop(stopped(b"k1", offset=9))
    assert facts("show", "chat", "--at", "1/9")["key"] == "k1"


def test_show_shows_a_key_that_stopped_in_two_partitions_twice(log: StateLog) -> None:
    log.stop(stopped(b"k1"))
    log.stop(stopped(b"k1", partition=2, offset=5))
    assert run("show", "chat", "k1").count("lane       k1, of app chat") == 2
    assert [lane["partition"] for lane in facts("show", "chat", "k1")] == [1, 2]


def test_show_remembers_a_lane_that_goes_on(log: StateLog) -> None:
    with operator() as given:
        log.answer(given.order("release", partition=1, key=b"k1"))
        log.answer(given.order("release", partition=2, key=None, offset=7))
    shown = run("show", "chat", "k1")
    assert "state      not stopped\n" in shown
    assert "release: done" in shown
    assert "next" not in shown
    assert len(facts("show", "chat", "--at", "2/7")["audit"]) == 1


def test_show_names_no_command_for_a_lane_that_is_being_skipped(log: StateLog) -> None:
    log.stop(stopped(b"k1", Stop.SKIPPING))
    assert facts("show", "chat", "k1")["next"] == []


# -- release and skip ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "done"), [("release", "released"), ("skip", "skipped")])
def test_an_order_is_given_and_what_came_of_it_is_told(command: str, done: str, log: StateLog) -> None:
    log.stop(stopped(b"k1"))
    log.app = log.answer
    assert run(command, "chat", "k1") == f"lane k1: {done} by the task {OWNER}, 0.3 s later\n"
    (order,) = log.given
    assert (order.do, order.partition, order.key) == (command, 1, b"k1")


@pytest.mark.parametrize("command", ["release", "skip"])
def test_an_app_that_does_not_run_carries_it_out_when_it_starts(command: str, log: StateLog) -> None:
    log.stop(stopped(None, offset=7))
    shown = run(command, "chat", "--at", "1/7", *QUICK)
    assert shown == "the app does not seem to run; the order stands and is carried out when it starts\n"
    (order,) = log.given
    assert (order.do, order.partition, order.key, order.offset) == (command, 1, None, 7)


def test_an_order_that_stands_is_waited_for_and_not_given_again(log: StateLog) -> None:
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
        "stands": True,
        "answer": None,
    }
    assert len(log.given) == 1


def test_another_order_takes_the_place_of_the_one_that_stands_and_says_so(log: StateLog) -> None:
    log.stop(stopped(b"k1"))
    run("skip", "chat", "k1", *QUICK)
    done = CliRunner().invoke(app, ["lanes", "release", "chat", "k1", *QUICK])
    assert f"lane k1: this takes the place of {log.given[0].who}'s order to skip" in done.stderr
    assert [order.do for order in log.given] == ["skip", "release"]


def test_what_the_app_did_not_do_is_exit_code_1(log: StateLog) -> None:
    log.stop(stopped(b"k1"))

    def refuse(order: Order) -> None:
        log.answer(order, "the lane is not blocked", ok=False)

    log.app = refuse
    shown = run("release", "chat", "k1", code=1)
    assert shown.startswith(f"lane k1: not released, the lane is not blocked; said by the task {OWNER}, ")
    (told,) = facts("release", "chat", "k1", code=1)
    assert (told["answer"]["ok"], told["stands"]) == (False, False)


def test_all_blocked_lanes_can_be_released_at_once(log: StateLog) -> None:
    for number in range(30):
        log.stop(stopped(b"k%d" % number))
    log.stop(stopped(None, offset=7))
    log.stop(stopped(b"parked", Stop.PARKED))
    log.stop(stopped(b"going", Stop.SKIPPING))
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
    assert "1 of 2 lanes released\nthe order stands and is not answered yet" in shown


def test_all_of_none_is_no_mistake(log: StateLog) -> None:
    log.stop(stopped(b"parked", Stop.PARKED))
    assert run("release", "chat", "--all") == "no lane of app 'chat' is blocked\n"
    assert facts("release", "chat", "--all") == []


def test_ctrl_c_leaves_the_order_standing(log: StateLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log.stop(stopped(b"k1"))

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Operator, "wait", interrupted)
    done = CliRunner().invoke(app, ["lanes", "release", "chat", "k1"])
    assert (done.exit_code, done.stdout) == (130, "")
    assert done.stderr == "not waiting any more: the order stands; the app goes on\n"
    assert len(log.given) == 1


# -- audit ---------------------------------------------------------------------------------------------------------


def test_the_audit_shows_who_did_what_and_what_came_of_it(log: StateLog) -> None:
    assert run("audit", "chat") == "nobody has ordered anything of app 'chat'\n"
    with operator() as given:
        given.order("skip", partition=1, key=b"k1")
        log.answer(given.order("release", partition=1, key=b"k1"))
        given.order("release", partition=1, key=None, offset=7)
        given.order("redrive", partition=2, key=b"k2", letters=[4])
        given.order("redrive", partition=2, key=None)
    lines = run("audit", "chat").splitlines()
    assert [line.split()[3] for line in lines[1:]] == ["skip", "release", "release", "redrive", "redrive"]
    for line, says in zip(
        lines[1:],
        (
            "another order took its place",
            f"done, by {OWNER} 0.3 s later",
            "keyless, 1/7  the order stands",
            "redrive 1 letter",
            "redrive all letters  keyless, 2/-",
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
        "offset": None,
        "letters": None,
        "who": log.given[1].who,
        "at": log.given[1].at,
        "stands": False,
        "answer": {"ok": True, "result": "done", "owner": OWNER, "at": log.given[1].at + 0.3},
    }
    assert (found[2]["key"], found[2]["offset"], found[3]["letters"]) == (None, 7, 1)


# -- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["list", "nobody"], "app 'nobody' never ran at nowhere:1: topic 'nobody.state' does not exist"),
        (["list", "chat", "--bootstrap", ""], "no broker given: use --bootstrap host:9092"),
        (["list", "chat", "-o", "acks=0"], "needs kafka.NAME=VALUE"),
        (["show", "chat"], "say which lane: its KEY, or --at PARTITION/OFFSET"),
        (["show", "chat", "k1", "--at", "1/2"], "say which lane"),
        (
            ["show", "chat", "nobody"],
            "lane nobody of app 'chat' has not stopped, and nobody has ordered anything",
        ),
        (["show", "chat", "--at", "1/99"], "no lane of app 'chat' has stopped at 1/99"),
        (["release", "chat"], "say which lane"),
        (["release", "chat", "--at", "7"], "'7' is no position"),
        (["release", "chat", "hex:zz"], "after 'hex:' come hex digits"),
        (["release", "chat", "k1", "--all"], "give a lane or --all, not both"),
        (["release", "chat", "k9"], "lane k9 of app 'chat' has not stopped. 'keylane lanes list chat' shows"),
        (["skip", "chat", "--at", "1/99"], "no lane of app 'chat' has stopped at 1/99. 'keylane lanes list"),
        (
            ["release", "chat", "at the park"],
            "lane at the park is parked, not blocked: its messages are among the dead letters. Use: keylane dlq",
        ),
        (["skip", "chat", "at the park"], "Use: keylane dlq redrive chat --lane 'at the park'"),
        (["skip", "chat", "going"], "lane going is being skipped already"),
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
    log.stop(stopped(b"at the park", Stop.PARKED))
    log.stop(stopped(b"going", Stop.SKIPPING))
    assert says in refused(monkeypatch, capsys, arguments)
    assert log.given == []


@pytest.mark.parametrize(
    ("command", "examples"), [("list", 2), ("show", 3), ("release", 3), ("skip", 2), ("audit", 2)]
)
def test_help_teaches_by_example(command: str, examples: int) -> None:
    assert run(command, "--help").count(f"\n  keylane lanes {command} chat") == examples
