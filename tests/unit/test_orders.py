from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.core.record import Stop
from keylane.errors import KafkaError
from keylane.kafka import operator as operator_module
from keylane.kafka.letters import redriven_offsets
from keylane.kafka.operator import Answer, Heard, NeverRanError, Operator, Tally, new_order
from keylane.kafka.orders import Order, audit_name, decode_order
from keylane.kafka.settings import KafkaSettings
from statelog import OWNER, StateLog, stopped

pytestmark = pytest.mark.timeout(20)

SETTINGS = KafkaSettings("nowhere:1")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> StateLog:
    return StateLog(monkeypatch)


def order(**more: Any) -> Order:
    given: dict[str, Any] = {
        "do": "release",
        "partition": 1,
        "key": b"k1",
        "id": "a1",
        "who": "me",
        "at": 1.5,
    }
    return Order(**{**given, **more})


# -- orders as records ---------------------------------------------------------------------------------------------


@given(
    key=st.none() | st.binary(max_size=30),
    do=st.sampled_from(["release", "skip", "redrive"]),
    offset=st.integers(0, 1 << 60),
    letters=st.none() | st.lists(st.integers(0, 1 << 60), max_size=5).map(tuple),
)
def test_an_order_is_read_as_it_was_written(
    key: bytes | None, do: Any, offset: int, letters: tuple[int, ...] | None
) -> None:
    keyless = key is None and do != "redrive"
    made = order(
        key=key, do=do, offset=offset if keyless else 0, letters=letters if do == "redrive" else None
    )
    assert decode_order(made.name, 1, made.encode()) == made


def test_a_lane_has_one_place_for_release_and_skip_and_one_for_redrive() -> None:
    names = {
        (do, key): order(do=do, key=key, offset=7).name
        for do in ("release", "skip", "redrive")
        for key in (b"k1", b"k2", None)
    }
    for key in (b"k1", b"k2", None):
        assert names["release", key] == names["skip", key]
        assert names["redrive", key] != names["skip", key]
    assert len(set(names.values())) == 6
    assert order(key=None, offset=7).name != order(key=None, offset=8).name
    assert order(key=b"").name != order(key=None).name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"order/lane/k", b"junk"),
        (b"order/lane/k", b"[]"),
        (b"order/lane/k", b'{"do": "dance", "letters": null, "id": "a", "who": "b", "at": 1}'),
        (b"order/lane/k", b'{"do": "skip", "letters": null, "id": "a", "who": "b"}'),
        (b"order/lane/k", b'{"do": "skip", "letters": null, "id": "a", "who": "b", "at": "noon"}'),
        (b"order/redrive/k", b'{"do": "redrive", "letters": ["x"], "id": "a", "who": "b", "at": 1}'),
        (b"order/keyless/x", b'{"do": "skip", "letters": null, "id": "a", "who": "b", "at": 1}'),
        (b"order/other", b'{"do": "skip", "letters": null, "id": "a", "who": "b", "at": 1}'),
    ],
)
def test_what_is_no_order_is_refused(name: bytes, value: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        decode_order(name, 0, value)


def test_an_order_says_who_gave_it_and_when() -> None:
    made = new_order("redrive", partition=2, key=b"k", letters=[3, 1])
    assert "@" in made.who
    assert abs(made.at - time.time()) < 5
    assert made.letters == (3, 1)
    assert made.id != new_order("redrive", partition=2, key=b"k").id


# -- the operator --------------------------------------------------------------------------------------------------


def test_an_app_without_a_state_topic_never_ran(log: StateLog) -> None:
    log.topics = {}
    with pytest.raises(
        NeverRanError, match=r"app 'chat' never ran at nowhere:1: topic 'chat\.state' does not"
    ):
        Operator(SETTINGS, "chat")
    assert redriven_offsets(SETTINGS, "chat") == {}


def test_the_operator_sees_what_the_topic_says_and_follows_it(log: StateLog) -> None:
    log.stop(stopped(b"late", since=9.0))
    log.stop(stopped(b"early", since=3.0, partition=0))
    log.redriven(2, 4, 5, 9)
    with Operator(SETTINGS, "chat") as operator:
        assert [record.key for record in operator.lanes()] == [b"early", b"late"]
        assert {p: [5 in r, 6 in r] for p, r in operator.redriven().items()} == {2: [True, False]}
        log.put(0, b"lane/early", None)
        log.stop(stopped(b"parked", Stop.PARKED))
        assert {record.key for record in operator.lanes()} == {b"late", b"parked"}
    assert log.closed == 1
    assert 9 in redriven_offsets(SETTINGS, "chat")[2]
    assert log.closed == 2


def test_the_operator_follows_thousands_of_records_at_once(log: StateLog) -> None:
    with Operator(SETTINGS, "chat") as operator:
        for number in range(3000):
            log.stop(stopped(b"%d" % number))
        assert len(operator.lanes()) == 3000


def test_an_order_stands_until_it_is_answered(log: StateLog) -> None:
    with Operator(SETTINGS, "chat") as operator:
        given = operator.order("redrive", partition=1, key=b"k1", letters=[4, 5])
        assert operator.standing() == [given]
        assert operator.answer(given, 0) is None
        log.answer(given, "2 through, 0 dead again, 0 still parked")
        answer = operator.answer(given, 5)
        assert answer is not None
        assert (answer.ok, answer.owner, answer.tally) == (True, OWNER, Tally(through=2, dead=0, parked=0))
        assert operator.standing() == []


@pytest.mark.parametrize("result", ["done", "", "the lane is not blocked", "1 through"])
def test_what_was_no_redrive_has_no_tally(result: str) -> None:
    assert Answer(ok=True, result=result, owner="", at=0.0).tally is None


def test_more_orders_than_the_client_holds_are_given_all_the_same(log: StateLog) -> None:
    log.room = 7
    with Operator(SETTINGS, "chat") as operator:
        operator.give(new_order("release", partition=0, key=b"%d" % n) for n in range(50))
        assert len(operator.standing()) == len(operator.audit()) == 50


def test_an_order_that_is_refused_is_an_error(log: StateLog) -> None:
    log.refuses = "TOPIC_AUTHORIZATION_FAILED"
    with (
        Operator(SETTINGS, "chat") as operator,
        pytest.raises(KafkaError, match=r"could not be written to topic 'chat\.state': TOPIC_AUTH"),
    ):
        operator.order("release", partition=0, key=b"k")


def test_the_audit_has_every_order_and_what_came_of_it(log: StateLog) -> None:
    with Operator(SETTINGS, "chat") as operator:
        first = operator.order("skip", partition=1, key=b"k1")
        second = operator.order("release", partition=1, key=b"k1")
        keyless = operator.order("release", partition=2, key=None, offset=7)
        letters = operator.order("redrive", partition=2, key=b"\xff", letters=[1, 2, 3])
        log.answer(second, "the lane is not blocked", ok=False)
        log.put(0, audit_name("junk"), b"junk")
        log.put(0, audit_name("half"), b'{"id": "half"}')
        log.put(2, audit_name(letters.id, done=True), b"junk")
        audit = {action.id: action for action in operator.audit()}
    assert list(audit) == [first.id, second.id, keyless.id, letters.id]
    assert (audit[first.id].answer, audit[first.id].stands) == (None, False)
    answer = audit[second.id].answer
    assert answer is not None
    assert (answer.ok, answer.result) == (False, "the lane is not blocked")
    assert (audit[keyless.id].key, audit[keyless.id].offset, audit[keyless.id].stands) == (None, 7, True)
    assert (audit[letters.id].key, audit[letters.id].letters) == (b"\xff", 3)
    assert audit[letters.id].answer is None
    assert all("@" in action.who for action in audit.values())


# -- waiting -------------------------------------------------------------------------------------------------------


def test_waiting_ends_when_all_are_answered_and_says_how_many_are(log: StateLog) -> None:
    told: list[int] = []
    with Operator(SETTINGS, "chat") as operator:
        orders = [operator.order("release", partition=0, key=b"%d" % n) for n in range(3)]
        left = list(orders)

        def tell(answered: int) -> None:
            told.append(answered)
            if left:
                log.answer(left.pop())

        answers = operator.wait(orders, tell=tell).answers
    assert set(answers) == {order.id for order in orders}
    assert (told[0], told[-1]) == (0, 3)


def test_waiting_ends_soon_when_nothing_comes_from_the_app(log: StateLog) -> None:
    with Operator(SETTINGS, "chat") as operator:
        given = operator.order("redrive", partition=0, key=b"k")
        began = time.monotonic()
        assert operator.wait([given], silence=0.2) == Heard(answers={}, lost=frozenset())
        assert 0.1 < time.monotonic() - began < 5
        assert operator.standing() == [given]


@pytest.mark.parametrize("sign", ["letters", "a word"])
def test_an_app_that_has_given_a_sign_is_waited_for(sign: str, log: StateLog) -> None:
    with Operator(SETTINGS, "chat") as operator:
        given = operator.order("redrive", partition=0, key=b"k")
        began = time.monotonic()
        said = False

        def tell(_answered: int) -> None:
            nonlocal said
            if not said:
                said = True
                log.redriven(0, 1) if sign == "letters" else log.put(0, b"audit/x/begun", b"{}")
            if time.monotonic() - began > 0.5 and given in operator.standing():
                log.answer(given)

        assert set(operator.wait([given], silence=0.2, tell=tell).answers) == {given.id}


def test_an_order_whose_place_another_took_is_answered_with_that_one(log: StateLog) -> None:
    with Operator(SETTINGS, "chat") as operator:
        given = operator.order("redrive", partition=0, key=b"k", letters=[1])
        other = operator.order("redrive", partition=0, key=b"k", letters=[1, 2])

        def tell(_answered: int) -> None:
            if other in operator.standing():
                log.answer(other, "2 through, 0 dead again, 0 still parked")

        answers = operator.wait([given], tell=tell).answers
    assert answers[given.id].result == "2 through, 0 dead again, 0 still parked"


@pytest.mark.parametrize("other", ["skip", None])
def test_an_order_that_nobody_will_answer_is_given_up(
    other: Any, log: StateLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_module, "_GRACE", 0.1)
    with Operator(SETTINGS, "chat") as operator:
        given = operator.order("release", partition=0, key=b"k")
        assert operator.standing() == [given]

        def tell(_answered: int) -> None:
            if given not in operator.standing():
                return
            if other is None:
                log.put(0, given.name, None)
            else:
                operator.order(other, partition=0, key=b"k")

        assert operator.wait([given], tell=tell) == Heard(answers={}, lost=frozenset([given.id]))


def test_the_record_of_an_order_names_no_letters_in_the_audit(log: StateLog) -> None:
    with Operator(SETTINGS, "chat") as operator:
        given = operator.order("redrive", partition=0, key=b"k", letters=range(10_000))
    audited = next(r for r in log.records if r.name == audit_name(given.id))
    assert json.loads(audited.content or b"")["letters"] == 10_000
    assert len(audited.content or b"") < 300
