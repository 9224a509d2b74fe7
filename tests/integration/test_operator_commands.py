"""What an operator does on the command line, and what a running app makes of it: Kafka and a task, no Spark."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import pytest
from typer.testing import CliRunner

from keylane import App, Message, Poison
from keylane.cli import redrive as redrive_module
from keylane.cli.arguments import place
from keylane.cli.main import app as cli
from keylane.dlq.headers import dead_letter_headers
from keylane.errors import KeylaneError
from keylane.kafka.settings import KafkaSettings
from keylane.policies.failure_info import FailureInfo
from keylane.state.admin import AdminClient, cancel_command, new_command
from keylane.state.commands import operator_name
from keylane.state.topic import order_stop
from keylane.testing import HistoryWriter, Verdict
from keylane.worker.task import Task
from keylane.worker.task_plan import TaskPlan
from support.tasks import note_plan
from support.topics import Log, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from keylane.message import Headers
    from keylane.offsets.identity import TopicIdentity
    from keylane.policies.failure_policy import OnFailure
    from keylane.state.commands import Command
    from keylane.testing import Sent

pytestmark = pytest.mark.timeout(60)

LETTER = FailureInfo(
    stage="work", error="E", message="forged", traceback="", attempts=1, failed_at=1.7e9, failures=()
)
ACTS_WITHIN = 2.0
"""Seconds from an operator's command to its effect."""


class Shop:
    """An app, its topics, and an operator at the command line. Messages whose value begins with ``bad`` fail.

    ``with shop.running():`` runs the app: one task, in this process.
    """

    def __init__(self, log: Log, name: str, folder: Path, policy: OnFailure, partitions: int = 2) -> None:
        self.log = log
        self.name = name
        self.fixed: set[bytes] = set()
        self.pace = 0.0  # seconds that a message takes
        self._folder = folder
        self._policy: OnFailure = policy
        self._runs = 0
        self.partitions = partitions
        log.create(f"{name}.in", f"{name}.out", partitions=partitions)

    def send(self, *texts: str) -> list[Sent]:
        """``key=value`` each; ``@1=value`` has no key and goes to partition 1."""
        messages: list[dict[str, Any]] = []
        for text in texts:
            key, _, value = text.partition("=")
            where = {"partition": int(key[1:])} if key.startswith("@") else {"key": key.encode()}
            messages.append({"value": value.encode(), **where})
        return self.log.send(f"{self.name}.in", messages)

    def at(self, value: str) -> str:
        """The source position of this message."""
        (row,) = (row for row in self.log.read(f"{self.name}.in") if row.value == value.encode())
        return f"{self.name}.in/{row.partition}@{row.offset}"

    def running(self) -> _Run:
        self._runs += 1
        app = App(
            self.name,
            source=f"{self.name}.in",
            sink=f"{self.name}.out",
            on_failure=self._policy,
            failure_guard=None,
            commit_interval=0.2,
            spool=self._folder / "spool",
            observer=HistoryWriter(self._folder / "history", f"run{self._runs}"),
        )

        @app.stage
        async def work(msg: Message) -> bytes:
            if msg.value.startswith(b"bad") and msg.value not in self.fixed:
                raise Poison(f"{msg.value.decode()} makes no sense")
            await asyncio.sleep(self.pace)
            return bytes(msg.value)

        return _Run(self.log, app, f"run{self._runs}")

    def results(self, key: bytes | None) -> list[str]:
        return [(row.value or b"").decode() for row in self.log.read(f"{self.name}.out") if row.key == key]

    def wait_for(self, results: int) -> None:
        wait_until(lambda: self.log.count(f"{self.name}.out") >= results, 20, f"{results} results")

    def lanes(self) -> dict[str | None, str]:
        return {lane["key"]: lane["state"] for lane in self.json("lanes", "list")}

    def wait_for_lanes(self, **lanes: str) -> None:
        wait_until(lambda: self.lanes() == lanes, 20, f"lanes {lanes}")

    def wait_for_letters(self, letters: int) -> None:
        wait_until(lambda: self.json("dlq", "list")["letters"] == letters, 20, f"{letters} letters")

    def wait_until_done(self) -> None:
        wait_until(lambda: self.log.lag(self.name, f"{self.name}.in") == 0, 20, "everything is done")

    def __call__(self, group: str, command: str, *arguments: str) -> Ran:
        """Run a command as ``keylane`` does."""
        return Ran([group, command, self.name, *arguments, "--bootstrap", self.log.bootstrap])

    def json(self, group: str, command: str, *arguments: str) -> Any:
        """What a command that ends well prints with --json."""
        return json.loads(self(group, command, *arguments, "--json").ok())


class Ran:
    """A command that was run."""

    def __init__(self, given: list[str]) -> None:
        began = time.monotonic()
        ran = CliRunner().invoke(cli, given)
        self.seconds = time.monotonic() - began
        self.code, self.out, self.err = ran.exit_code, ran.stdout, ran.stderr
        if isinstance(ran.exception, KeylaneError):
            self.code, self.err = 2, str(ran.exception)
        elif ran.exception is not None and not isinstance(ran.exception, SystemExit):
            raise ran.exception

    def ok(self) -> str:
        assert self.code == 0, (self.code, self.out, self.err)
        return self.out


@dataclass
class _Run:
    log: Log
    app: App
    name: str
    error: BaseException | None = None

    def __enter__(self) -> Self:
        topics = self.log.cluster.prepare(self.app.spec)
        self.partitions = topics.partitions
        plan = TaskPlan(
            run=self.name,
            epoch=0,
            task=0,
            settings=self.log.settings,
            identity=self.log.cluster.identity(self.app.source, self.app.dlq),
            starts=dict.fromkeys(range(topics.partitions), 0),
            partitions=topics.partitions,
            until=None,
            seconds=60,
            sink_limit=topics.sink_limit,
            outcomes="none",
        )
        note_plan(self.log, self.app)
        self._thread = threading.Thread(target=self._work, args=(plan,), daemon=True)
        self._thread.start()
        return self

    def _work(self, plan: TaskPlan) -> None:
        try:
            for _ in Task(self.app.spec, plan).outcomes():
                pass
        except BaseException as error:
            self.error = error

    def __exit__(self, *_: object) -> None:
        order_stop(self.log.settings, self.app.spec.state, self.partitions, self.name)
        self._thread.join(20)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


def test_released_lane_continues_at_once_in_order(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    shop = Shop(log, name, tmp_path, "block")
    sent = shop.send("k1=1", "k1=bad2", "k1=3", "k2=4", "k1=5", "@0=bad6", "k2=7")
    with shop.running():
        shop.wait_for(3)
        wait_until(lambda: len(shop.json("lanes", "list")) == 2, 20, "two lanes have stopped")
        (lane,) = (lane for lane in shop.json("lanes", "list") if lane["key"] == "k1")
        assert (lane["state"], f"{shop.name}.in/{lane['partition']}@{lane['offset']}") == (
            "blocked",
            shop.at("bad2"),
        )
        assert (lane["stage"], lane["error"]) == ("work", "keylane.errors.Poison")
        assert "2 blocked" in shop("lanes", "list").ok()
        assert shop.results(b"k1") == ["1"]

        again = shop("lanes", "release", "k1")  # too early: it is blocked again
        assert "lane k1: released by task " in again.out
        assert "lane k1: blocked again at offset " in again.out
        assert again.code == 1
        wait_until(lambda: shop.json("lanes", "show", "k1")["attempts"] == 2, 20, "it is blocked again")

        shop.fixed |= {b"bad2", b"bad6"}
        began = time.monotonic()
        shop("lanes", "release", "k1").ok()
        shop.wait_for(6)
        assert time.monotonic() - began < ACTS_WITHIN
        shop("lanes", "release", "--at", shop.at("bad6")).ok()
        shop.wait_until_done()
        assert (
            shop("lanes", "list").ok() == f"no lane of app '{name}' has stopped, and no command is waiting\n"
        )
        late = shop("lanes", "release", "k1")
        assert (late.code, late.err.partition(".")[0]) == (2, f"lane k1 of app '{name}' has not stopped")
    assert shop.results(b"k1") == ["1", "bad2", "3", "5"]
    assert shop.results(None) == ["bad6"]
    assert judge(sent).repeats == 0
    assert [(a["do"], a["key"], a["answer"]["ok"]) for a in shop.json("lanes", "audit")] == [
        ("release", "k1", True),
        ("release", "k1", True),
        ("release", None, True),
    ]


def test_skipped_message_is_a_dead_letter_and_its_lane_continues(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    shop = Shop(log, name, tmp_path, "block_and_dlq")
    sent = shop.send("k1=bad1", "k1=2", "k1=bad3", "k1=4", "k2=5")
    with shop.running():
        shop.wait_for_lanes(k1="blocked")
        assert shop.json("dlq", "list")["causes"][0]["kinds"] == {"archived": 1}
        refused = shop("dlq", "redrive", f"{sent[0].partition}/0")  # the only letter there is
        assert (refused.code, "is an archived copy" in refused.err) == (2, True)
        nothing = shop("dlq", "redrive", "--all").ok()
        assert nothing.startswith(f"nothing to redrive in {name}.dlq; left out: 1 archived")

        began = time.monotonic()
        assert "lane k1: skipped by task " in shop("lanes", "skip", "k1").ok()
        shop.wait_for(2)
        assert time.monotonic() - began < ACTS_WITHIN
        wait_until(lambda: shop.json("lanes", "show", "k1")["offset"] == sent[2].offset, 20, "the next one")
        blocked = shop("dlq", "redrive", "--lane", "k1")
        assert (blocked.code, "lane k1 is blocked" in blocked.err) == (2, True)
        shop("lanes", "skip", "--at", shop.at("bad3")).ok()
        shop.wait_until_done()
        shop.wait_for_lanes()
    assert shop.results(b"k1") == ["2", "4"]
    lines = shop.json("dlq", "list", "--letters", "--kind", "dead")["list"]
    skipped = [shop.at("bad1"), shop.at("bad3")]
    assert sorted(line["source"] for line in lines) == skipped
    judge(sent, finished=[place(position) for position in skipped])


@pytest.mark.slow
def test_a_parked_lane_is_redriven_whole_and_in_order(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    shop = Shop(log, name, tmp_path, "park")
    sent = shop.send("k1=1", "k1=bad2", "k1=3", "k2=4", "k1=5")
    with shop.running():
        shop.wait_for_letters(3)
        sent += shop.send("k1=6")
        shop.wait_for_letters(4)
        assert shop.lanes() == {"k1": "parked"}
        refused = shop("lanes", "release", "k1")
        assert (refused.code, f"Use: keylane dlq redrive {name} --lane k1" in refused.err) == (2, True)
        (cause,) = shop.json("dlq", "list")["causes"]
        assert (cause["count"], cause["behind"], cause["lanes"]) == (4, 3, 1)
        part = shop("dlq", "redrive", cause["example"])
        assert (part.code, "can only be redriven whole" in part.err) == (2, True)

        plan = shop.json("dlq", "redrive", "--lane", "k1", "--dry-run")
        places = [shop.at(value).rpartition("/")[2] for value in ("bad2", "3", "5", "6")]
        assert plan["lanes"] == [
            {"key": "k1", "partition": sent[0].partition, "parked": True, "letters": 4, "order": places}
        ]
        assert shop.lanes() == {"k1": "parked"}
        assert shop.json("lanes", "audit") == []

        early = shop("dlq", "redrive", "--lane", "k1")
        assert (early.code, early.out.splitlines()[0]) == (
            1,
            "4 dead letters of 1 lane: 0 through, 0 dead again, 4 still parked",
        )
        shop.fixed.add(b"bad2")
        redriven = shop("dlq", "redrive", "--stage", "work")
        assert redriven.ok() == "4 dead letters of 1 lane: 4 through, 0 dead again, 0 still parked\n"
        assert redriven.seconds < 2 * ACTS_WITHIN
        sent += shop.send("k1=7")
        shop.wait_until_done()
        shop.wait_for(7)
        assert shop.lanes() == {}
        assert shop.json("dlq", "list")["letters"] == 0
        assert "4 redriven, not shown (--all)" in shop("dlq", "list").ok()
        assert shop.json("dlq", "list", "--all")["letters"] == 4
        nothing = f"nothing to redrive in {name}.dlq; left out: 4 redriven before\n"
        assert shop("dlq", "redrive", "--lane", "k1").ok() == nothing
        assert shop("dlq", "redrive", "--all").ok() == nothing
    assert shop.results(b"k1") == ["1", "bad2", "3", "5", "6", "7"]
    assert judge(sent).repeats == 0


@pytest.mark.slow
def test_new_messages_wait_behind_their_lanes_redrive(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    shop = Shop(log, name, tmp_path, "park")
    keys = [f"k{number}" for number in range(8)]
    sent = shop.send(*(f"{key}=bad" for key in keys), *(f"{key}={n}" for n in range(30) for key in keys))
    with shop.running():
        shop.wait_for_letters(8 * 31)
        shop.fixed.add(b"bad")
        stop = threading.Event()
        numbers = iter(range(30, 10_000))

        def offer() -> None:
            while not stop.is_set():
                number = next(numbers)
                sent.extend(shop.send(*(f"{key}={number}" for key in keys)))

        offering = threading.Thread(target=offer)
        offering.start()
        try:
            time.sleep(0.3)
            shop("dlq", "redrive", "--all").ok()
            time.sleep(0.3)
        finally:
            stop.set()
            offering.join()
        shop.wait_until_done()
        shop.wait_for(len(sent))
        assert shop.lanes() == {}
        assert shop.json("dlq", "list")["letters"] == 0
    for key in keys:
        values = shop.results(key.encode())
        assert values == ["bad", *map(str, range(len(values) - 1))]
    assert judge(sent).repeats == 0


def test_selected_letters_are_redriven_and_may_fail_again(log: Log, name: str, tmp_path: Path) -> None:
    shop = Shop(log, name, tmp_path, "skip")
    shop.send("k1=bad1", "k1=2", "k1=bad3", "k2=bad4", "@1=bad5", "k1=bad6")
    with shop.running():
        shop.wait_for_letters(5)
        shop.fixed |= {b"bad1", b"bad4", b"bad5"}
        lines = shop.json("dlq", "list", "--letters")["list"]
        at = {line["source"]: line["position"] for line in lines}
        first, third = at[shop.at("bad1")], at[shop.at("bad3")]
        shop("dlq", "redrive", first).ok()
        assert shop.results(b"k1") == ["2", "bad1"]
        shop.wait_for_letters(4)

        again = shop("dlq", "redrive", third, "--json")
        assert again.code == 1
        found = json.loads(again.out)
        assert (found["through"], found["dead_again"], found["lanes"][0]["ok"]) == (0, 1, False)
        lines = shop.json("dlq", "list", "--letters")["list"]
        (new,) = (line for line in lines if line["source"] == shop.at("bad3"))
        assert (new["redrives"], new["position"] == third) == (1, False)

        shop.fixed |= {b"bad3", b"bad6"}
        found = shop.json("dlq", "redrive", "--error", "Poison")
        assert (found["letters"], found["through"], len(found["lanes"])) == (4, 4, 3)
        assert shop.json("dlq", "list")["letters"] == 0
    assert shop.results(b"k1") == ["2", "bad1", "bad3", "bad6"]
    assert shop.results(None) == ["bad5"]


@pytest.mark.slow
def test_commands_given_while_down_run_at_the_start(
    log: Log, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redrive_module, "NO_ANSWER_SECONDS", 0.5)
    shop = Shop(log, name, tmp_path, "block")
    shop.send("a=bad1", "a=2", "b=bad3", "b=4", "c=bad5", "c=6")
    with shop.running():
        shop.wait_for_lanes(a="blocked", b="blocked", c="blocked")
        shop("lanes", "skip", "c").ok()
        shop.wait_for(1)
        shop.wait_for_lanes(a="blocked", b="blocked")
    shop.fixed |= {b"bad1", b"bad5"}
    stands = "the app does not seem to be running; it will carry out the command when it starts\n"
    assert shop("lanes", "release", "a", "--wait", "0.5").ok() == stands
    assert shop("lanes", "release", "b", "--wait", "0").ok() == stands
    assert shop("lanes", "skip", "b", "--wait", "0").ok() == stands  # takes its place
    for _ in range(2):
        told = shop("dlq", "redrive", "--lane", "c").ok()
        assert (
            "the app does not seem to be running. 1 command is waiting to be carried out when it starts"
            in told
        )
    states = {
        lane["key"]: (lane["state"], [o["do"] for o in lane["commands"]])
        for lane in shop.json("lanes", "list")
    }
    assert states == {"a": ("blocked", ["release"]), "b": ("blocked", ["skip"]), "c": (None, ["redrive"])}
    shop.send("c=7")

    with shop.running():
        shop.wait_until_done()
        shop.wait_for(6)
        shop.wait_for_lanes()
        assert shop.json("dlq", "list")["letters"] == 1
    assert shop.results(b"a") == ["bad1", "2"]
    assert shop.results(b"b") == ["4"]
    assert shop.results(b"c") == ["6", "bad5", "7"]
    audit = shop.json("lanes", "audit")
    assert [(a["key"], a["do"], a["answer"] and a["answer"]["ok"], a["waiting"]) for a in audit] == [
        ("c", "skip", True, False),
        ("a", "release", True, False),
        ("b", "release", False, False),
        ("b", "cancel", True, False),
        ("b", "skip", True, False),
        ("c", "redrive", True, False),
    ]
    assert "cancelled by " in shop("lanes", "audit").ok()


def test_an_order_is_about_the_message_that_was_blocked(log: Log, name: str, tmp_path: Path) -> None:
    shop = Shop(log, name, tmp_path, "block")
    first, second, *_ = shop.send("k=bad1", "k=bad2", "k=3", "k=bad4", "k=5")
    gone = "nothing to do: message {}@{} is not blocked any more"

    def skip(operator: AdminClient, offset: int) -> Command:
        return operator.command("skip", partition=first.partition, key=b"k", offset=offset)

    with shop.running():
        shop.wait_for_lanes(k="blocked")
        with AdminClient(log.settings, name) as operator:
            heard = operator.wait([skip(operator, first.offset), skip(operator, first.offset)], timeout=10)
            results = [(answer.ok, answer.result) for answer in heard.answers.values()]
            assert results == [(True, "done"), (False, gone.format(first.partition, first.offset))]
            wait_until(lambda: shop.json("lanes", "show", "k")["offset"] == second.offset, 20, "the next one")
    with AdminClient(log.settings, name) as operator:  # while the app is down
        given = [skip(operator, second.offset), skip(operator, second.offset)]
        assert operator.wait(given, timeout=0).answers == {}
        with shop.running():
            heard = operator.wait(given, timeout=20)
            results = [(answer.ok, answer.result) for answer in heard.answers.values()]
            assert results == [(True, "done"), (False, gone.format(second.partition, second.offset))]
            shop.wait_for(1)
            shop.wait_for_lanes(k="blocked")
            assert f"{name}.in/{first.partition}@{shop.json('lanes', 'show', 'k')['offset']}" == shop.at(
                "bad4"
            )
    assert shop.results(b"k") == ["3"]
    assert shop.json("dlq", "list")["letters"] == 2


def test_a_cancelled_order_is_not_carried_out(log: Log, name: str, tmp_path: Path) -> None:
    shop = Shop(log, name, tmp_path, "block")
    (bad,) = shop.send("k=bad")
    with shop.running():
        shop.wait_for_lanes(k="blocked")
    shop("lanes", "skip", "k", "--wait", "0").ok()
    assert "1 not answered yet" in shop("lanes", "cancel", "k", "--wait", "0").ok()
    with shop.running(), AdminClient(log.settings, name) as operator:
        wait_until(lambda: operator.audit()[-1].answer is not None, 20, "the cancel is answered")
        skip, cancel = (action.answer for action in operator.audit())
        assert skip is not None
        assert cancel is not None
        assert (skip.ok, skip.result.partition("@")[0], cancel.ok) == (
            False,
            f"cancelled by {operator_name().partition('@')[0]}",
            True,
        )
        assert shop.lanes() == {"k": "blocked"}
        # Given at once, the cancel wins; given after the answer, the order has won.
        command = new_command("skip", partition=bad.partition, key=b"k", offset=bad.offset)
        both = [command, cancel_command(command)]
        operator.give(both)
        heard = operator.wait(both, timeout=10)
        assert [heard.answers[each.id].ok for each in both] == [False, True]
        assert shop.lanes() == {"k": "blocked"}
        command = operator.command("skip", partition=bad.partition, key=b"k", offset=bad.offset)
        assert operator.answer(command, 10) is not None
        late = cancel_command(command)
        operator.give([late])
        answer = operator.answer(late, 10)
        assert answer is not None
        assert (answer.ok, answer.result) == (
            False,
            "nothing to do: the order was carried out or cancelled before",
        )
        shop.wait_for_letters(1)


def test_a_redrive_that_is_cancelled_leaves_the_lane_parked(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    shop = Shop(log, name, tmp_path, "park")
    sent = shop.send("k=bad", *(f"k={number}" for number in range(40)))
    with shop.running():
        shop.wait_for_letters(41)
        shop.fixed.add(b"bad")
        shop.pace = 0.05
        shop("dlq", "redrive", "--lane", "k", "--no-wait").ok()
        shop.wait_for(5)
        assert " was cancelled\n" in shop("lanes", "cancel", "k").ok()
        redrive = shop.json("lanes", "audit")[0]["answer"]
        assert redrive["ok"] is False
        assert " still parked; cancelled by " in redrive["result"]
        cut = log.count(f"{name}.out")
        assert 5 <= cut < 41
        sent += shop.send("k=40")
        shop.wait_for_letters(42 - cut)
        assert shop.lanes() == {"k": "parked"}
        shop.pace = 0.0
        shop("dlq", "redrive", "--lane", "k").ok()
        shop.wait_for(42)
        shop.wait_for_lanes()
    assert shop.results(b"k") == ["bad", *map(str, range(41))]
    assert judge(sent).repeats == 0


def test_interrupted_redrive_continues_in_the_next_run(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    shop = Shop(log, name, tmp_path, "park")
    sent = shop.send("k1=bad", *(f"k1={number}" for number in range(40)))
    with shop.running():
        shop.wait_for_letters(41)
        shop.fixed.add(b"bad")
        shop.pace = 0.05
        assert (
            shop("dlq", "redrive", "--lane", "k1", "--no-wait").ok().startswith("41 dead letters of 1 lane\n")
        )
        shop.wait_for(5)
    assert shop.lanes() == {"k1": "parked"}
    cut = log.count(f"{name}.out")
    assert 5 <= cut < 41
    assert shop.json("dlq", "list")["letters"] == 41 - cut
    shop.pace = 0.0
    with shop.running():
        sent += shop.send("k1=40")
        shop.wait_for(42)
        shop.wait_for_lanes()
    assert shop.results(b"k1") == ["bad", *map(str, range(41))]
    assert judge(sent).repeats == 0


def test_an_app_that_never_ran_is_one_clear_sentence(log: Log) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keylane", "lanes", "list", "nobody", "--bootstrap", log.bootstrap],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    says = f"error: app 'nobody' never ran at {log.bootstrap}: topic 'nobody.state' does not exist\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", says)


def test_keyless_messages_of_two_partitions_are_distinct(log: Log, name: str, tmp_path: Path) -> None:
    shop = Shop(log, name, tmp_path, "block")
    shop.send("@0=bad1", "@1=bad2")
    with shop.running():
        wait_until(lambda: len(shop.json("lanes", "list")) == 2, 20, "both are blocked")
        shop.fixed |= {b"bad1", b"bad2"}
        assert shop("lanes", "release", "--at", "0/0").ok()
        shop.wait_for(1)
        assert shop.results(None) == ["bad1"]
        assert shop("lanes", "release", "--at", "1/0").ok()
        shop.wait_for(2)
        shop.wait_until_done()


def test_keyless_letters_of_two_partitions_are_redriven(log: Log, name: str, tmp_path: Path) -> None:
    shop = Shop(log, name, tmp_path, "skip")
    shop.send("@0=bad1", "@1=bad2")
    with shop.running():
        shop.wait_for_letters(2)
        shop.fixed |= {b"bad1", b"bad2"}
        assert shop("dlq", "redrive", "--all").ok()
        assert sorted(shop.results(None)) == ["bad1", "bad2"]
        shop.wait_for_letters(0)


def test_repeated_letter_is_redriven_once(log: Log, name: str, tmp_path: Path) -> None:
    shop = Shop(log, name, tmp_path, "skip")
    shop.send("a=bad1", "a=b")
    with shop.running():
        shop.wait_for_letters(1)
        shop.fixed.add(b"bad1")
        assert shop("dlq", "redrive", "--lane", "a").ok()
        (letter,) = log.read(f"{name}.dlq")
        log.send(  # as a crash between the letter and its progress leaves it
            f"{name}.dlq",
            [{"key": b"a", "value": letter.value, "headers": letter.headers, "partition": letter.partition}],
        )
        assert shop("dlq", "redrive", "--lane", "a").code in (0, 2)
        time.sleep(1)
        assert shop.results(b"a") == ["b", "bad1"]


def test_blocked_lane_admits_redriven_messages(log: Log, name: str, tmp_path: Path) -> None:
    shop = Shop(log, name, tmp_path, "block")
    shop.send("a=bad1", "a=bad2", "a=c")
    with shop.running():
        shop.wait_for_lanes(a="blocked")
        assert shop("lanes", "skip", "a").ok()
        wait_until(lambda: len(log.read(f"{name}.dlq")) == 1, 20, "the letter of the skipped one")
        wait_until(
            lambda: [lane["offset"] for lane in shop.json("lanes", "list")] == [1],
            20,
            "blocked at the second",
        )
        shop.fixed.add(b"bad1")
        with AdminClient(KafkaSettings(log.bootstrap), name) as operator:
            (lane,) = operator.lanes()
            command = operator.command("redrive", partition=lane.partition, key=b"a")
            answer = operator.answer(command, 10)
        assert answer is not None
        assert answer.ok
        assert shop.results(b"a") == ["bad1"]
        shop.fixed.add(b"bad2")
        assert shop("lanes", "release", "a").ok()
        shop.wait_for(3)
        assert shop.results(b"a") == ["bad1", "bad2", "c"]


def test_foreign_letters_neither_run_nor_end_a_task(log: Log, name: str, tmp_path: Path) -> None:
    shop = Shop(log, name, tmp_path, "skip", partitions=1)
    shop.send("k=bad1")
    with shop.running():
        shop.wait_for_letters(1)
        source = log.cluster.identity(f"{name}.in").source

        def head(app: str, topic: TopicIdentity, partition: int) -> Headers:
            return dead_letter_headers(app, None, "dead", topic, partition, 17, 0, LETTER)

        forged = [
            head("other", source, 0),
            head(name, replace(source, topic="other"), 0),
            head(name, source, 999),
            head(name, replace(source, id="before"), 0),
        ]
        log.send(
            f"{name}.dlq",
            [{"key": b"k", "value": b"forged", "partition": 0, "headers": headers} for headers in forged],
        )
        shop.fixed.add(b"bad1")
        assert shop.json("dlq", "list")["unreadable"] == 4
        assert (
            shop("dlq", "redrive", "--all")
            .ok()
            .startswith("1 dead letter of 1 lane: 1 through, 0 dead again")
        )
        with AdminClient(log.settings, name) as operator:  # whatever an order names
            answer = operator.answer(operator.command("redrive", partition=0, key=b"k", letters=[1, 3]), 10)
            assert answer is not None
            assert answer.result.startswith("0 through, 0 dead again")
        shop.send("k=2")
        shop.wait_for(2)
    assert shop.results(b"k") == ["bad1", "2"]
