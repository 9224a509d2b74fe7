from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from keylane.cli import redrive
from keylane.cli.main import app, main
from keylane.dlq.record import DeadLetter, DeadLetterKind, UnreadableDeadLetter
from keylane.errors import BrokerError, SettingsError
from keylane.kafka.settings import KafkaSettings
from keylane.lanes.lane_record import LaneStatus
from keylane.state import redrive_choice
from keylane.state import redrive_selection as selection_module
from keylane.state.admin import AdminClient, new_command
from keylane.state.answers import RedriveCounts
from keylane.state.redrive_selection import LaneSelection, RedriveSelection, command_for
from support.state_log import AT, StateLog, stopped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from keylane.state.commands import Command

pytestmark = pytest.mark.timeout(20)

Topic = list[DeadLetter | UnreadableDeadLetter]


def letter(offset: int, key: bytes | None = b"k1", **more: Any) -> DeadLetter:
    """Its message was a hundred offsets before it in the same partition."""
    given: dict[str, Any] = {
        "partition": 1,
        "value": b"v",
        "headers": (),
        "headers_unreadable": None,
        "topic": "chat.in",
        "topic_id": "id-1",
        "cluster": "c1",
        "source_partition": more.get("partition", 1),
        "source_offset": 100 + offset,
        "timestamp": None,
        "kind": DeadLetterKind.DEAD,
        "stage": "answer",
        "error": "builtins.TimeoutError",
        "message": "no answer",
        "traceback": "",
        "attempts": 2,
        "failures": (),
        "failed_at": AT,
        "park": None,
        "redrives": 0,
        "app": "chat",
        "app_version": None,
    }
    return DeadLetter(offset=offset, key=key, **{**given, **more})


def parked(offset: int, key: bytes | None = b"k1", park: int = 100, **more: Any) -> DeadLetter:
    why = {} if park == 100 + offset else {"stage": None, "error": None, "message": None}
    return letter(offset, key, kind=DeadLetterKind.PARKED, park=park, **{**why, **more})


def rubbish(offset: int, partition: int = 1) -> UnreadableDeadLetter:
    return UnreadableDeadLetter(
        partition=partition, offset=offset, reason="it has no header", key=None, value=b"", headers=()
    )


# -- what is chosen ------------------------------------------------------------------------------------------------


def chosen(
    letters: Iterable[DeadLetter | UnreadableDeadLetter],
    wanted: Iterable[int] | None = None,
    redriven: Iterable[int] = (),
    stop: LaneStatus | None = None,
) -> RedriveSelection:
    offsets = None if wanted is None else set(wanted)
    made = RedriveSelection(
        lambda letter, _cause, _at: offsets is None or letter.offset in offsets,
        {1: set(redriven)},
        [] if stop is None else [stopped(b"k1", stop), stopped(None, LaneStatus.BLOCKED, offset=7)],
    )
    for each in letters:
        made.add(each)
    return made


def only(made: RedriveSelection) -> LaneSelection:
    (lot,) = made.lots()
    return lot


def test_letters_are_chosen_lane_by_lane() -> None:
    letters = [
        letter(0),
        letter(1, b"k2"),
        letter(2),
        letter(3, None),
        letter(0, partition=2),
        letter(4, None),
    ]
    lots = {(lot.partition, lot.key): lot.letters() for lot in chosen(letters).lots()}
    assert lots == {(1, b"k1"): (0, 2), (1, b"k2"): (1,), (1, None): (3, 4), (2, b"k1"): (0,)}
    lot = only(chosen(letters, [2]))
    assert (lot.chosen, len(lot), lot.letters()) == (1, 2, (2,))


def test_a_lane_runs_in_the_order_of_its_messages() -> None:
    late = letter(5, source_offset=3)  # it waited in a spool
    assert only(chosen([letter(0), letter(1), late])).sources() == [3, 100, 101]


def test_redriven_and_archived_letters_are_left_out() -> None:
    letters: Topic = [letter(0), letter(1), letter(2, kind=DeadLetterKind.ARCHIVED), rubbish(3), letter(4)]
    made = chosen(letters, redriven=[0])
    assert only(made).letters() == (1, 4)
    assert (made.redriven, made.archived, made.unreadable) == (1, 1, 1)
    made = chosen(letters, [4], redriven=[0])
    assert (made.redriven, made.archived, made.unreadable) == (0, 0, 1)


def test_redrive_selects_a_letter_with_its_repetition() -> None:
    letters = [letter(0), letter(1), letter(7, source_offset=100)]
    for wanted in ([0], [7], [0, 7]):
        lot = only(chosen(letters, wanted))
        assert (lot.letters(), lot.chosen, lot.sources()) == ((0, 7), 1, [100])
    assert only(chosen(letters, [1])).letters() == (1,)


def test_letter_of_a_recreated_topic_is_no_repetition() -> None:
    """The message at the same offset of the topic that was deleted is another one."""
    letters = [letter(0, topic_id="id-0"), letter(7, source_offset=100)]
    made = chosen(letters, redriven=[0])
    assert only(made).letters() == (7,)
    assert made.redriven == 1


def test_repeat_of_a_redriven_letter_is_left_out() -> None:
    made = chosen(
        [letter(0), letter(7, source_offset=100), letter(8, source_offset=100, redrives=1)], redriven=[0]
    )
    assert only(made).letters() == (8,)
    assert made.redriven == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=12))
def test_redrive_selects_no_message_twice(
    rows: list[tuple[int, bool, bool]],
) -> None:
    letters = [letter(n, source_offset=source) for n, (source, _, _) in enumerate(rows)]
    wanted = {n for n, (_, want, _) in enumerate(rows) if want}
    redriven = {n for n, (_, _, gone) in enumerate(rows) if gone}
    made = chosen(letters, wanted, redriven)
    lots = made.lots()
    runs = [source for lot in lots for source in lot.sources()]
    assert len(runs) == len(set(runs))
    named = {offset for lot in lots for offset in lot.letters()}
    assert not named & redriven
    sources = [source for source, _, _ in rows]
    for n in wanted - redriven:
        first = sources.index(sources[n])
        assert (n in named) == (first not in redriven)


def test_letters_of_a_blocked_lane_are_left_out() -> None:
    made = chosen([letter(0), letter(1, b"k2"), letter(2, None)], stop=LaneStatus.BLOCKED)
    assert {lot.key for lot in made.lots()} == {b"k2", None}
    assert made.blocked.total() == 1


def test_redrive_selects_a_named_parked_lane_without_letters() -> None:
    made = chosen([letter(0, b"k2")], stop=LaneStatus.PARKED)
    made.lane(1, b"k1")
    assert [(lot.key, lot.parked, lot.chosen) for lot in made.lots()] == [(b"k2", False, 1), (b"k1", True, 0)]


# -- the commands --------------------------------------------------------------------------------------------------


def test_redrive_names_letters_unless_the_whole_lane_is_meant() -> None:
    lot = only(chosen([letter(0), letter(1), letter(2)], [0, 2]))
    command = command_for("chat", lot, [], whole=False)
    assert (command.do, command.partition, command.key, command.letters) == ("redrive", 1, b"k1", (0, 2))
    assert command_for("chat", lot, [], whole=True).letters is None


def test_a_parked_lane_is_redriven_whole_or_not_at_all() -> None:
    letters = [parked(0), parked(1), letter(2, b"k2")]
    lot = only(chosen(letters[:2], stop=LaneStatus.PARKED))
    assert command_for("chat", lot, [], whole=False).letters is None
    lot = only(chosen(letters, [1], stop=LaneStatus.PARKED))
    with pytest.raises(SettingsError, match=r"lane k1 is parked, and can only be redriven whole, in its order, but "
                       r"1 of its 2 dead letters were chosen\. Use: keylane dlq redrive chat --lane k1"):  # fmt: skip
        command_for("chat", lot, [], whole=False)
    lot = only(chosen(letters, [2], stop=LaneStatus.PARKED))
    assert command_for("chat", lot, [], whole=False).letters == (2,)


def standing(letters: Iterable[int] | None) -> Command:
    return new_command("redrive", partition=1, key=b"k1", letters=None if letters is None else tuple(letters))


@pytest.mark.parametrize(
    ("stands", "wanted", "whole", "becomes"),
    [
        ([0, 2], [0, 2], False, "same"),
        ([0, 2], [2], False, "same"),
        (None, [2], False, "same"),
        (None, [0, 1, 2], True, "same"),
        ([0], [2], False, (2,)),
        ([0], [0, 2], False, (0, 2)),
        ([0, 2], [0, 2], True, None),
    ],
)
def test_open_command_that_names_the_letters_is_reused(
    stands: list[int] | None, wanted: list[int], whole: bool, becomes: Any
) -> None:
    lot = only(chosen([letter(0), letter(1), letter(2)], wanted))
    before = standing(stands)
    command = command_for("chat", lot, [before], whole=whole)
    if becomes == "same":
        assert command is before
    else:
        assert command.letters == becomes
        assert command.name != before.name


def test_redrive_of_too_many_letters_is_whole_lane_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    letters = [letter(n) for n in range(70_000)]
    whole = command_for("chat", only(chosen(letters)), [], whole=False)
    assert whole.letters is not None
    assert len(whole.encode()) < selection_module.COMMAND_BYTES_MAX
    monkeypatch.setattr(selection_module, "COMMAND_BYTES_MAX", 300_000)
    assert command_for("chat", only(chosen(letters)), [], whole=False).letters is None
    some = only(chosen(letters, range(60_000)))
    with pytest.raises(SettingsError, match=r"lane k1: 60,000 single dead letters are too many "
                       r"for one command\. Choose fewer at a time, or all of them: "
                       r"keylane dlq redrive chat --lane k1"):  # fmt: skip
        command_for("chat", some, [], whole=False)
    keyless = only(chosen([letter(n, None) for n in range(70_000)], range(60_000)))
    with pytest.raises(
        SettingsError, match=r"dead letters without a key in partition 1: .* redrive chat --all"
    ):
        command_for("chat", keyless, [], whole=False)


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> StateLog:
    monkeypatch.setattr(redrive, "NO_ANSWER_SECONDS", 0.1)
    return StateLog(monkeypatch)


@pytest.fixture
def topic(log: StateLog, monkeypatch: pytest.MonkeyPatch) -> Topic:
    """What the dead-letter topic holds."""
    held: Topic = []

    def read_letters(
        _settings: Any, name: str, *, partitions: Any = None
    ) -> Iterator[DeadLetter | UnreadableDeadLetter]:
        if name != "chat.dlq":
            raise BrokerError(f"topic {name!r} does not exist")
        return (each for each in held if partitions is None or each.partition in partitions)

    monkeypatch.setattr(redrive_choice, "read_dead_letters", read_letters)
    return held


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["dlq", "redrive", *arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout


def facts(*arguments: str, code: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", code=code))


def works(log: StateLog, ok: int = 1, dead: int = 0, parked: int = 0, stale: int = 0) -> None:
    """The app answers every order like this."""

    def answer(command: Command) -> None:
        log.answer(command, RedriveCounts(ok=ok, dead=dead, parked=parked, stale=stale), ok=not dead + parked)

    log.app = answer


def test_a_dry_run_shows_the_order_and_changes_nothing(topic: Topic, log: StateLog) -> None:
    log.stop(stopped(b"k1", LaneStatus.PARKED))
    topic += [parked(0), *(parked(n) for n in range(1, 12)), letter(20, b"k2"), letter(21, None), rubbish(22)]
    shown = run("chat", "--all", "--dry-run")
    rows = [line.split() for line in shown.splitlines()]
    assert rows[1][:5] == ["k1", "12", "parked", "1@100", "1@101"]
    assert rows[1][-3:] == ["…", "4", "more"]
    assert rows[2] == ["k2", "1", "running", "1@120"]
    assert rows[3][:2] == ["-", "1"]
    assert shown.endswith(
        "14 dead letters of 3 lanes would be redriven; also what is parked meanwhile; left out: 1 unreadable\n"
    )
    found = facts("chat", "1@20", "--dry-run")
    assert found == {
        "app": "chat",
        "dry_run": True,
        "letters": 1,
        "left_out": {"redriven": 0, "archived": 0, "blocked": 0, "unreadable": 1},
        "lanes": [{"key": "k2", "partition": 1, "parked": False, "letters": 1, "order": ["1@120"]}],
    }
    assert log.given == []


@pytest.mark.parametrize(
    ("arguments", "commands"),
    [
        (["1@0", "1@2"], {(1, b"k1", (0, 2))}),
        (["1@1", "2@0"], {(1, b"k2", (1,)), (2, b"k1", (0,))}),
        (["--lane", "k1"], {(1, b"k1", None), (2, b"k1", None)}),
        (["--lane", "hex:ff"], {(1, b"\xff", None)}),
        (
            ["--all"],
            {(1, b"k1", None), (1, b"k2", None), (1, b"\xff", None), (2, b"k1", None), (1, None, None)},
        ),
        (["--stage", "check"], {(1, b"k2", (1,))}),
        (["--error", "Refused"], {(1, None, (4,))}),
        (["--since", "1h"], {(1, b"\xff", (3,))}),
        (["--until", "1h", "--stage", "check"], {(1, b"k2", (1,))}),
        (["--kind", "dead", "--error", "Refused"], {(1, None, (4,))}),
    ],
)
def test_letters_are_chosen_by_place_lane_filter_or_all(
    arguments: list[str], commands: set[Any], topic: Topic, log: StateLog
) -> None:
    topic += [
        letter(0),
        letter(1, b"k2", stage="check"),
        letter(2),
        letter(3, b"\xff", failed_at=time.time()),
        letter(4, None, error="shop.Refused"),
        letter(0, partition=2),
    ]
    works(log)
    run("chat", *arguments)
    assert {(command.partition, command.key, command.letters) for command in log.given} == commands
    assert {command.do for command in log.given} == {"redrive"}


def test_results_are_printed_in_total(topic: Topic, log: StateLog) -> None:
    topic += [letter(0), letter(1, b"k2"), letter(2, kind=DeadLetterKind.ARCHIVED), letter(3)]
    log.redriven(1, 3)
    works(log)
    assert run("chat", "--all") == (
        "2 dead letters of 2 lanes: 2 through, 0 dead again, 0 still parked; "
        "left out: 1 redriven before, 1 archived: see 'keylane lanes list'\n"
    )


def test_failed_redrive_exits_with_1(topic: Topic, log: StateLog) -> None:
    topic += [letter(n, b"k%d" % n) for n in range(25)]
    works(log, 3, 1, 2)
    shown = run("chat", "--all", code=1)
    assert "25 dead letters of 25 lanes: 75 through, 25 dead again, 50 still parked\n" in shown
    assert "lane k19: 3 through, 1 dead again, 2 still parked\n… 5 more lanes where some messages" in shown
    assert "'keylane dlq list chat' shows why some are dead again" in shown
    assert "'keylane lanes list chat' shows why some are still parked" in shown


def test_a_lane_with_stale_letters_counts_in_the_totals(topic: Topic, log: StateLog) -> None:
    topic += [letter(0), letter(1, b"k2")]
    works(log, ok=3, stale=2)
    shown = run("chat", "--all")
    assert shown == "2 dead letters of 2 lanes: 6 through, 0 dead again, 0 still parked, 4 stale\n"
    found = facts("chat", "--all")
    assert (found["through"], found["stale"]) == (6, 4)


def test_as_json(topic: Topic, log: StateLog) -> None:
    topic += [letter(0), letter(1, b"k2")]
    log.app = lambda command: log.answer(command, RedriveCounts(ok=1)) if command.key == b"k1" else None
    found = facts("chat", "--all", "--wait", "0.2")
    first, second = found.pop("lanes")
    assert found == {
        "app": "chat",
        "dry_run": False,
        "letters": 2,
        "left_out": {"redriven": 0, "archived": 0, "blocked": 0, "unreadable": 0},
        "through": 1,
        "dead_again": 0,
        "still_parked": 0,
        "stale": 0,
        "unanswered": 1,
    }
    assert first == {
        "key": "k1",
        "partition": 1,
        "parked": False,
        "letters": 1,
        "id": log.given[0].id,
        "ok": True,
        "result": "1 through, 0 dead again, 0 still parked",
        "waiting": False,
    }
    assert (second["key"], second["ok"], second["waiting"]) == ("k2", None, True)


def test_an_app_that_does_not_run_does_it_when_it_starts(topic: Topic, log: StateLog) -> None:
    topic += [letter(0), letter(1, b"k2")]
    assert run("chat", "--all") == (
        "2 dead letters of 2 lanes\nno answer: the app does not seem to be running. 2 commands "
        "are waiting to be carried out when it starts; 'keylane lanes audit chat' shows the results\n"
    )
    assert len(log.given) == 2


def test_open_redrives_are_awaited_and_not_given_again(topic: Topic, log: StateLog) -> None:
    topic += [letter(0), letter(1, b"k2")]
    for _ in range(3):
        run("chat", "--all", "--no-wait")
        run("chat", "--lane", "k1", "--no-wait")
        run("chat", "1@1", "--no-wait")
    assert [command.key for command in log.given] == [b"k1", b"k2"]
    found = facts("chat", "1@0", "--wait", "0")
    assert (found["unanswered"], found["lanes"][0]["id"]) == (1, log.given[0].id)


def test_no_wait_gives_the_orders_and_leaves(topic: Topic, log: StateLog) -> None:
    topic.append(letter(0))
    shown = run("chat", "1@0", "--no-wait")
    assert shown.startswith(
        "1 dead letter of 1 lane\n1 command is waiting to be carried out; 'keylane lanes audit chat'"
    )
    assert len(log.given) == 1


def test_lost_command_exits_with_1(topic: Topic, log: StateLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keylane.state.admin._ANSWER_GRACE_SECONDS", 0.1)
    topic.append(letter(0))
    with AdminClient(KafkaSettings("nowhere:1"), "chat") as operator:
        given = operator.command("redrive", partition=1, key=b"k1")
    follow = AdminClient._follow

    def vanish(self: AdminClient) -> None:
        follow(self)
        if log.polls > 200:
            log.put(1, given.name, None)

    monkeypatch.setattr(AdminClient, "_follow", vanish)
    assert "1 command ended without an answer" in run("chat", "--all", "--wait", "5", code=1)


def test_ctrl_c_ends_the_waiting_only(topic: Topic, log: StateLog, monkeypatch: pytest.MonkeyPatch) -> None:
    topic.append(letter(0))

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(AdminClient, "wait", interrupted)
    done = CliRunner().invoke(app, ["dlq", "redrive", "chat", "--all"])
    assert (done.exit_code, done.stdout) == (130, "")
    assert done.stderr == "stopped waiting: the commands remain, and the app will carry them out\n"
    assert len(log.given) == 1


def test_progress_is_printed_at_intervals(
    topic: Topic, log: StateLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redrive, "_LINE_INTERVAL_SECONDS", 0.05)
    topic += [letter(0), letter(1, b"k2")]

    def answer(command: Command) -> None:
        log.redriven(1, 0)
        if command.key == b"k1":
            log.answer(command, RedriveCounts(ok=1))

    log.app = answer
    done = CliRunner().invoke(app, ["dlq", "redrive", "chat", "--all", "--wait", "0.4"])
    assert "1 of 2 lanes, 1 dead letter redriven\n" in done.stderr


def test_letters_of_a_former_source_are_redriven_by_name(topic: Topic, log: StateLog) -> None:
    topic += [letter(0), letter(1, topic_id="id-2"), letter(2, topic="other")]
    works(log)
    assert facts("chat", "--all", "--dry-run")["lanes"][0]["order"] == ["1@100"]
    run("chat", "1@1", "1@2")
    assert [command.letters for command in log.given] == [(1, 2)]


@pytest.mark.parametrize("more", [{"app": "shop"}, {"source_partition": 999}])
def test_foreign_letters_are_never_redriven(topic: Topic, log: StateLog, more: dict[str, Any]) -> None:
    topic += [letter(0), letter(1, **more)]
    works(log)
    assert facts("chat", "--all", "--dry-run")["lanes"][0]["order"] == ["1@100"]
    run("chat", "--lane", "k1")
    done = CliRunner().invoke(app, ["dlq", "redrive", "chat", "1@1"])
    assert "chat.dlq/1@1 cannot be redriven: foreign: expected " in str(done.exception)
    assert len(log.given) == 1


def test_nothing_to_redrive_is_said(topic: Topic, log: StateLog) -> None:
    assert run("chat", "--all") == "nothing to redrive in chat.dlq\n"
    topic += [letter(0), letter(1)]
    log.redriven(1, 0, 1)
    for way in (["--all"], ["--lane", "k1"], ["1@0"], ["--stage", "answer"]):
        count = 1 if way == ["1@0"] else 2
        assert run("chat", *way) == f"nothing to redrive in chat.dlq; left out: {count} redriven before\n"
    assert facts("chat", "--all")["lanes"] == []
    assert log.given == []


def test_parked_lane_without_letters_can_be_resumed(topic: Topic, log: StateLog) -> None:
    log.stop(stopped(b"k1", LaneStatus.PARKED))
    works(log, 0)
    for way in (["--lane", "k1"], ["--all"]):
        assert run("chat", *way) == "0 dead letters of 1 lane: 0 through, 0 dead again, 0 still parked\n"
    assert [(command.key, command.letters) for command in log.given] == [(b"k1", None)] * 2
    assert run("chat", "--stage", "answer") == "nothing to redrive in chat.dlq\n"


def test_redrive_filter_matching_all_of_a_lane_takes_it_whole(topic: Topic, log: StateLog) -> None:
    log.stop(stopped(b"k1", LaneStatus.PARKED))
    topic += [parked(0), parked(1), letter(2, b"k2", stage="check")]
    works(log)
    run("chat", "--stage", "answer")
    assert [(command.key, command.letters) for command in log.given] == [(b"k1", None)]


def test_letters_of_blocked_lanes_wait_for_their_message(topic: Topic, log: StateLog) -> None:
    log.stop(stopped(b"k1"))
    topic += [letter(0), letter(1, b"k2")]
    works(log)
    assert (
        "1 dead letter of 1 lane: 1 through, 0 dead again, 0 still parked; left out: 1 of blocked lanes"
        in run("chat", "--all")
    )
    assert [command.key for command in log.given] == [b"k2"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            [],
            "expected one choice of dead letters: positions (PARTITION@OFFSET …), --lane KEY, --all, or filters",
        ),
        (["1@0", "--all"], "expected one choice of dead letters"),
        (["--lane", "k1", "--stage", "answer"], "expected one choice of dead letters"),
        (["--all", "--since", "1h"], "expected one choice of dead letters"),
        (["17"], "such as 3@17 or chat.dlq/3@17, got '17'"),
        (["1@0", "1@99"], "no dead letter at chat.dlq/1@99"),
        (["1@5"], "chat.dlq/1@5 cannot be redriven: it has no header"),
        (
            ["1@4"],
            "dead letter chat.dlq/1@4 is an archived copy: its message is still in its lane, or was released since.",
        ),
        (["--kind", "archived"], "archived dead letters are copies: their messages are still in their lanes"),
        (["--lane", "nobody"], "no dead letter of app 'chat' has the key nobody"),
        (["--lane", "hex:zz"], "expected hex digits after 'hex:'"),
        (["--since", "1h", "--until", "2h"], "--since must be before --until, got 1h and 2h"),
        (["--since", "noon"], "--since: expected an age"),
        (
            ["1@1"],
            "lane park is parked, and can only be redriven whole, in its order, but 1 of its 2 dead letters",
        ),
        (["--stage", "answer"], "Use: keylane dlq redrive chat --lane park"),
        (["1@3"], "lane stuck is blocked: its dead letters cannot run before the message that blocks it"),
        (["--lane", "stuck"], "Release or skip that first: keylane lanes show chat stuck"),
        (["--all", "--wait", "1", "--no-wait"], "give --wait or --no-wait, not both"),
        (["--all", "-o", "acks=1"], "--option: expected kafka.NAME=VALUE"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str],
    says: str,
    topic: Topic,
    log: StateLog,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.stop(stopped(b"park", LaneStatus.PARKED))
    log.stop(stopped(b"stuck"))
    topic += [
        letter(0),
        parked(1, b"park", park=101),
        parked(2, b"park", park=77),  # parked again, at a message whose letter says nothing
        letter(3, b"stuck"),
        letter(4, kind=DeadLetterKind.ARCHIVED),
        rubbish(5),
    ]
    monkeypatch.setattr("sys.argv", ["keylane", "dlq", "redrive", "chat", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert says in err
    assert log.given == []


def test_an_app_that_never_ran_cannot_redrive(topic: Topic, log: StateLog) -> None:
    log.topics = {}
    done = CliRunner().invoke(app, ["dlq", "redrive", "chat", "--all"])
    assert isinstance(done.exception, BrokerError)
    assert "never ran" in str(done.exception)
