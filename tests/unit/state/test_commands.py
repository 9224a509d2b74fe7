from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

import pytest
from confluent_kafka import KafkaError as ClientError
from hypothesis import given
from hypothesis import strategies as st

from keylane.errors import AccessDeniedError
from keylane.kafka.settings import KafkaSettings
from keylane.lanes.lane_record import LaneStatus
from keylane.state import admin as admin_module
from keylane.state import commands as commands_module
from keylane.state.admin import (
    AUDIT_KEY_BYTES,
    AdminClient,
    CommandResults,
    NeverRanError,
    cancel_command,
    known_dead_letters,
    new_command,
)
from keylane.state.answers import CommandAnswer, RedriveCounts, decode_command_answer
from keylane.state.commands import Command, audit_name, decode_command, outdated
from keylane.strict_json import MalformedRecordError
from support.state_log import OWNER, StateLog, stopped

pytestmark = pytest.mark.timeout(20)

SETTINGS = KafkaSettings("nowhere:1")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> StateLog:
    return StateLog(monkeypatch)


def command(**more: Any) -> Command:
    given: dict[str, Any] = {
        "do": "release",
        "partition": 1,
        "key": b"k1",
        "id": "a1",
        "who": "me",
        "at": 1.5,
    }
    return Command(**{**given, **more})


# -- commands as records -------------------------------------------------------------------------------------------


@given(
    key=st.none() | st.binary(max_size=30),
    do=st.sampled_from(["release", "skip", "redrive", "pause", "resume", "cancel"]),
    offset=st.integers(0, 1 << 60),
    letters=st.none() | st.lists(st.integers(0, 1 << 60), max_size=5).map(tuple),
)
def test_an_order_is_read_as_it_was_written(
    key: bytes | None, do: Any, offset: int, letters: tuple[int, ...] | None
) -> None:
    about = {"letters": letters} if do in ("redrive", "cancel") else {"offset": offset}
    made = command(key=key, do=do, withdraws="b2" if do == "cancel" else "", **about)
    assert decode_command(made.name, 1, made.encode()) == made


def test_every_order_has_a_record_of_its_own() -> None:
    given = [
        new_command(do, partition=0, key=key, offset=7 if do in ("release", "skip") else None)
        for do in ("release", "skip", "redrive", "reset")
        for key in (b"k1", None)
        for _ in range(2)
    ]
    names = {made.name for made in [*given, *map(cancel_command, given)]}
    assert len(names) == 32
    assert {name.rpartition(b"/")[0] for name in names} == {
        b"command/message",
        b"command/letters",
        b"command/reset",
        b"command/cancel",
    }


def _order(**more: Any) -> bytes:
    given = json.loads(command(offset=7, at=1.0).encode())
    return json.dumps(
        {name: value for name, value in {**given, **more}.items() if value != "left out"}
    ).encode()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"command/message/a1", b"junk"),
        (b"command/message/a1", b"[]"),
        (b"command/message/a1", _order(do="dance")),
        (b"command/message/a1", _order(at="left out")),
        (b"command/message/a1", _order(at="noon")),
        (b"command/message/a1", _order(offset=None)),
        (b"command/message/a1", _order(offset=-1)),
        (b"command/message/a1", _order(key="no hex")),
        (b"command/letters/a1", _order(do="redrive", letters=["x"])),
        (b"command/message/a2", _order()),
        (b"command/letters/a1", _order()),
        (b"command/other", _order()),
    ],
)
def test_malformed_command_is_refused(name: bytes, value: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        decode_command(name, 0, value)


def test_command_names_its_operator_and_time() -> None:
    made = new_command("redrive", partition=2, key=b"k", letters=[3, 1])
    assert "@" in made.who
    assert abs(made.at - time.time()) < 5
    assert made.letters == (3, 1)
    assert made.id != new_command("redrive", partition=2, key=b"k").id


# -- the operator --------------------------------------------------------------------------------------------------


def test_an_app_without_a_state_topic_never_ran(log: StateLog) -> None:
    log.topics = {}
    with pytest.raises(
        NeverRanError, match=r"app 'chat' never ran at nowhere:1: topic 'chat\.state' does not"
    ):
        AdminClient(SETTINGS, "chat")
    assert known_dead_letters(SETTINGS, "chat").redriven == {}


def test_admin_client_reads_and_follows_the_topic(log: StateLog) -> None:
    log.stop(stopped(b"late", since=9.0))
    log.stop(stopped(b"early", since=3.0, partition=0))
    log.redriven(2, 4, 5, 9)
    with AdminClient(SETTINGS, "chat") as operator:
        assert [record.key for record in operator.lanes()] == [b"early", b"late"]
        assert {p: [5 in r, 6 in r] for p, r in operator.redriven().items()} == {2: [True, False]}
        log.put(0, b"lane/early", None)
        log.stop(stopped(b"parked", LaneStatus.PARKED))
        assert {record.key for record in operator.lanes()} == {b"late", b"parked"}
    assert log.closed == 1
    assert 9 in known_dead_letters(SETTINGS, "chat").redriven[2]
    assert log.closed == 2


def test_the_operator_follows_thousands_of_records_at_once(log: StateLog) -> None:
    with AdminClient(SETTINGS, "chat") as operator:
        for number in range(3000):
            log.stop(stopped(b"%d" % number))
        assert len(operator.lanes()) == 3000


def test_command_stays_open_until_it_is_answered(log: StateLog) -> None:
    with AdminClient(SETTINGS, "chat") as operator:
        given = operator.command("redrive", partition=1, key=b"k1", letters=[4, 5])
        assert operator.open_commands() == [given]
        assert operator.answer(given, 0) is None
        log.answer(given, RedriveCounts(ok=2))
        answer = operator.answer(given, 5)
        assert answer is not None
        assert (answer.ok, answer.owner, answer.counts) == (True, OWNER, RedriveCounts(ok=2))
        assert operator.open_commands() == []


@given(
    ok=st.booleans(),
    why=st.text(max_size=50),
    counts=st.none()
    | st.builds(RedriveCounts, **dict.fromkeys(["ok", "stale", "dead"], st.integers(0, 1 << 40))),
)
def test_an_answer_is_read_as_it_was_written(ok: bool, why: str, counts: RedriveCounts | None) -> None:
    made = CommandAnswer(ok=ok, why=why, counts=counts, owner=OWNER, at=1.5)
    assert decode_command_answer(made.encode()) == made


@pytest.mark.parametrize("counts", [{}, {"ok": 1}, [1], {**asdict(RedriveCounts()), "dead": -1}])
def test_an_answer_with_malformed_counts_is_refused(counts: Any) -> None:
    answer = {"ok": True, "why": "", "counts": counts, "owner": "", "at": 1.0}
    with pytest.raises(MalformedRecordError):
        decode_command_answer(json.dumps(answer).encode())


def test_redrive_counts_are_rendered_with_stale_ones() -> None:
    counts = RedriveCounts(ok=1, duplicate=2, ignored=3, dead=4, parked=5)
    assert str(counts) == "6 through, 4 dead again, 5 still parked"
    assert str(RedriveCounts(stale=1000)) == "0 through, 0 dead again, 0 still parked, 1,000 stale"


def test_more_commands_than_the_client_queues_are_written(log: StateLog) -> None:
    log.room = 7
    with AdminClient(SETTINGS, "chat") as operator:
        operator.give(new_command("release", partition=0, key=b"%d" % n, offset=7) for n in range(50))
        assert len(operator.open_commands()) == len(operator.audit()) == 50


def test_refused_command_is_an_error(log: StateLog) -> None:
    log.refuses = ClientError(ClientError.TOPIC_AUTHORIZATION_FAILED, "Topic authorization failed")
    with (
        AdminClient(SETTINGS, "chat") as operator,
        pytest.raises(
            AccessDeniedError,
            match=r"could not be written to topic 'chat\.state': Topic .*Allow this user Write on topic 'chat\.state'",
        ),
    ):
        operator.command("release", partition=0, key=b"k", offset=7)


def test_audit_has_every_command_and_its_result(log: StateLog) -> None:
    with AdminClient(SETTINGS, "chat") as operator:
        first = operator.command("skip", partition=1, key=b"k1", offset=7)
        second = operator.command("release", partition=1, key=b"k1", offset=7)
        keyless = operator.command("release", partition=2, key=None, offset=7)
        letters = operator.command("redrive", partition=2, key=b"\xff", letters=[1, 2, 3])
        log.answer(second, "the lane is not blocked", ok=False)
        log.put(0, audit_name("junk"), b"junk")
        log.put(0, audit_name("half"), b'{"id": "half"}')
        log.put(2, audit_name(letters.id, done=True), b"junk")
        audit = {action.id: action for action in operator.audit()}
    assert list(audit) == [first.id, second.id, keyless.id, letters.id]
    assert (audit[first.id].answer, audit[first.id].open) == (None, True)
    answer = audit[second.id].answer
    assert answer is not None
    assert (answer.ok, answer.result) == (False, "the lane is not blocked")
    assert (audit[keyless.id].key, audit[keyless.id].offset, audit[keyless.id].open) == (None, 7, True)
    assert (audit[letters.id].key, audit[letters.id].letters) == (b"\xff", 3)
    assert audit[letters.id].answer is None
    assert all("@" in action.who for action in audit.values())


# -- waiting -------------------------------------------------------------------------------------------------------


def test_follow_ends_when_all_are_answered_and_counts_them(log: StateLog) -> None:
    told: list[int] = []
    with AdminClient(SETTINGS, "chat") as operator:
        commands = [operator.command("release", partition=0, key=b"%d" % n, offset=7) for n in range(3)]
        left = list(commands)

        def tell(answered: int) -> None:
            told.append(answered)
            if left:
                log.answer(left.pop())

        answers = operator.wait(commands, tell=tell).answers
    assert set(answers) == {command.id for command in commands}
    assert (told[0], told[-1]) == (0, 3)


def test_waiting_ends_soon_when_nothing_comes_from_the_app(log: StateLog) -> None:
    with AdminClient(SETTINGS, "chat") as operator:
        given = operator.command("redrive", partition=0, key=b"k")
        began = time.monotonic()
        assert operator.wait([given], silence=0.2) == CommandResults(answers={}, lost=frozenset())
        assert 0.1 < time.monotonic() - began < 5
        assert operator.open_commands() == [given]


@pytest.mark.parametrize("sign", ["letters", "a word"])
def test_an_app_that_has_given_a_sign_is_waited_for(sign: str, log: StateLog) -> None:
    with AdminClient(SETTINGS, "chat") as operator:
        given = operator.command("redrive", partition=0, key=b"k")
        began = time.monotonic()
        said = False

        def tell(_answered: int) -> None:
            nonlocal said
            if not said:
                said = True
                log.redriven(0, 1) if sign == "letters" else log.put(0, b"audit/x/begun", b"{}")
            if time.monotonic() - began > 0.5 and given in operator.open_commands():
                log.answer(given)

        assert set(operator.wait([given], silence=0.2, tell=tell).answers) == {given.id}


def test_command_without_an_answer_is_given_up(log: StateLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_module, "_ANSWER_GRACE_SECONDS", 0.1)
    with AdminClient(SETTINGS, "chat") as operator:
        given = operator.command("release", partition=0, key=b"k", offset=7)
        assert operator.open_commands() == [given]
        left = [given]

        def tell(_answered: int) -> None:
            if left:
                log.put(0, left.pop().name, None)

        assert operator.wait([given], tell=tell) == CommandResults(answers={}, lost=frozenset([given.id]))


def test_a_cancelled_order_does_not_wait_to_be_carried_out(log: StateLog) -> None:
    with AdminClient(SETTINGS, "chat") as operator:
        given = operator.command("skip", partition=1, key=b"k", offset=7)
        other = operator.command("skip", partition=1, key=b"k", offset=9)
        operator.give([cancel := cancel_command(given)])
        assert operator.open_commands() == [other]
        assert [(a.id, a.withdraws, a.open) for a in operator.audit()] == [
            (given.id, "", True),
            (other.id, "", True),
            (cancel.id, given.id, True),
        ]


def test_the_record_of_an_order_names_no_letters_in_the_audit(log: StateLog) -> None:
    with AdminClient(SETTINGS, "chat") as operator:
        given = operator.command("redrive", partition=0, key=b"k", letters=range(10_000))
    audited = next(r for r in log.records if r.name == audit_name(given.id))
    assert json.loads(audited.content or b"")["letters"] == 10_000
    assert len(audited.content or b"") < 300


def test_audit_has_the_beginning_of_a_long_key(log: StateLog) -> None:
    """The record would be twice as large as the message, more than the topic takes."""
    key = b"k" * 700_000
    with AdminClient(SETTINGS, "chat") as operator:
        given = operator.command("release", partition=0, key=key, offset=7)
        assert operator.open_commands() == [given]
        (entry,) = operator.audit()
    assert entry.key == key[:AUDIT_KEY_BYTES]
    audited = next(r for r in log.records if r.name == audit_name(given.id))
    assert len(audited.content or b"") < 40_000


# -- old audit entries ---------------------------------------------------------------------------------------------


def audits(*given: float) -> list[tuple[bytes, bytes]]:
    """The audit of commands that were given at these times, each with its answer."""
    return [
        record
        for number, at in enumerate(given)
        for record in (
            (audit_name(f"a{number}"), json.dumps({"at": at}).encode()),
            (audit_name(f"a{number}", done=True), b"{}"),
        )
    ]


def test_audit_of_old_orders_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands_module, "AUDITED_COMMANDS", 2)
    now = 1e6
    old, young = now - 2 * commands_module.AUDITED_SECONDS, now - 60
    assert outdated(audits(old, old), (), now) == []
    assert outdated(audits(old, old, old, young), (), now) == [
        b"audit/a0",
        b"audit/a0/done",
        b"audit/a1",
        b"audit/a1/done",
    ]
    assert outdated(audits(old, old, old, young), {"a0"}, now) == [b"audit/a1", b"audit/a1/done"]
    assert outdated(audits(young, young, young), (), now) == []
    assert outdated([(b"audit/x", b"junk"), *audits(old, old)], (), now) == [b"audit/x"]


def test_deleted_audit_records_are_forgotten(log: StateLog) -> None:
    with AdminClient(SETTINGS, "chat") as operator:
        given = operator.command("redrive", partition=0, key=b"k")
        log.answer(given)
        assert len(operator.audit()) == 1
        for name in (audit_name(given.id), audit_name(given.id, done=True)):
            log.put(0, name, None)
        assert operator.audit() == []
