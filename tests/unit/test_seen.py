from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane import Idempotency, SettingsError
from keylane.core.seen import LONGEST, SeenWindow

A, B = b"a", b"b"


@dataclass(frozen=True)
class Arrival:
    offset: int
    key: bytes
    event_id: bytes
    at: int | None


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """A partition's messages with event ids: holes in its offsets, clocks that go back, timestamps that are missing."""
    offset, found = 0, []
    for _ in range(draw(st.integers(0, 40))):
        offset += draw(st.sampled_from([1, 1, 1, 2, 7]))
        key, event_id = (
            draw(st.sampled_from([A, B])),
            draw(st.sampled_from([b"1", b"2", b"3", b"4", b"5", b"6"])),
        )
        at = draw(st.none() | st.integers(0, 20).map(lambda seconds: seconds * 1000))
        found.append(Arrival(offset, key, event_id, at))
    return found


settings = st.builds(Idempotency, count=st.integers(1, 20), age=st.sampled_from([1, 5.0, 600.0, math.inf]))


def naive(rule: Idempotency, before: list[Arrival], now: Arrival) -> int | None:
    """What the last message of the same key and event id, looked up in all of them, says."""
    for other in reversed(before):
        if (other.key, other.event_id) == (now.key, now.event_id):
            near = now.offset - other.offset <= rule.count
            timed = other.at is not None and now.at is not None
            young = not timed or now.at - other.at <= rule.age * 1000  # type: ignore[operator]
            return other.offset if near and young else None
    return None


def window_of(rule: Idempotency) -> SeenWindow:
    return SeenWindow(rule)


def feed(window: SeenWindow, messages: list[Arrival], together: int = 1) -> list[int | None]:
    """What it says of each; so many at once where they are all new."""
    found: list[int | None] = []
    for place in range(0, len(messages), together):
        some = messages[place : place + together]
        ids, offsets = [each.event_id for each in some], [each.offset for each in some]
        times, keys = [each.at for each in some], [each.key for each in some]
        if together > 1 and window.all_new((ids, offsets, times, keys)):
            found += [None] * len(some)
        else:
            found += [window.arrived(each.key, each.event_id, each.offset, each.at) for each in some]
    return found


@given(settings, arrivals(), st.integers(1, 5))
def test_the_window_says_what_the_whole_log_says(
    rule: Idempotency, messages: list[Arrival], together: int
) -> None:
    window = window_of(rule)
    expected = [naive(rule, messages[:place], each) for place, each in enumerate(messages)]
    assert feed(window, messages, together) == expected
    assert len(window) < 2.5 * rule.count


@given(settings, arrivals(), st.integers(0, 120))
def test_a_window_rebuilt_from_where_it_asks_for_answers_as_the_one_that_was_there(
    rule: Idempotency, messages: list[Arrival], watermark: int
) -> None:
    live, rebuilt = window_of(rule), window_of(rule)
    feed(live, [each for each in messages if each.offset < watermark])
    feed(rebuilt, [each for each in messages if rule.since(watermark) <= each.offset < watermark])
    rest = [each for each in messages if each.offset >= watermark]
    assert feed(live, rest) == feed(rebuilt, rest)


def test_the_rebuild_begins_so_many_offsets_before_the_watermark_and_never_before_the_first() -> None:
    assert Idempotency(count=10).since(100) == 90
    assert Idempotency(count=10).since(3) == 0


def test_key_and_event_id_cannot_be_mistaken_for_each_other() -> None:
    window = window_of(Idempotency())
    assert window.arrived(b"ab", b"c", 0, None) is None
    assert window.arrived(b"a", b"bc", 1, None) is None
    assert window.arrived(b"", b"abc", 2, None) is None
    assert window.arrived(b"ab", b"c", 3, None) == 0


def test_a_message_that_comes_again_at_its_own_or_an_earlier_place_repeats_nothing() -> None:
    window = window_of(Idempotency())
    assert window.arrived(A, b"1", 5, None) is None
    assert window.arrived(A, b"1", 5, None) is None
    assert window.arrived(A, b"1", 4, None) is None


def test_ids_of_any_length_take_bounded_room() -> None:
    window = window_of(Idempotency())
    for key, event_id in ((A, b"x" * LONGEST), (b"x" * LONGEST, b"1")):
        assert window.arrived(key, event_id, 0, None) is None
        assert window.arrived(key, event_id, 1, None) is None
    assert len(window) == 0
    window.arrived(A, b"x" * (LONGEST - 1), 2, None)
    assert window.arrived(A, b"x" * (LONGEST - 1), 3, None) == 2


def test_messages_that_never_ran_are_forgotten() -> None:
    window = window_of(Idempotency(count=2))
    feed(window, [Arrival(0, A, b"1", None), Arrival(1, A, b"2", None), Arrival(2, A, b"3", None)])
    window.forget({1, 2, 99})
    assert window.arrived(A, b"1", 2, None) == 0
    assert window.arrived(A, b"2", 3, None) is None
    assert window.arrived(A, b"3", 4, None) is None


def test_an_id_that_several_lanes_use_stays_known_when_one_of_them_is_forgotten() -> None:
    window = window_of(Idempotency())
    feed(window, [Arrival(0, A, b"1", None), Arrival(1, B, b"1", None)])
    window.forget({0})
    assert not window.all_new(([b"1"], [2], [None], [B]))
    assert window.arrived(B, b"1", 2, None) == 1
    assert window.arrived(A, b"1", 3, None) is None


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"count": 0}, "Idempotency(count=0): needs a whole number of messages, at least 1"),
        ({"count": 10.0}, "Idempotency(count=10.0)"),
        ({"count": True}, "Idempotency(count=True)"),
        ({"count": "10"}, "Idempotency(count='10')"),
        ({"age": 0}, "Idempotency(age=0): needs seconds, more than 0"),
        ({"age": -1.0}, "Idempotency(age=-1.0)"),
        ({"age": math.nan}, "Idempotency(age=nan)"),
        ({"age": "600"}, "Idempotency(age='600')"),
        ({"age": None}, "Idempotency(age=None)"),
    ],
    ids=repr,
)
def test_settings_that_make_no_sense_are_refused_in_words(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Idempotency(**given)
    assert complaint in str(caught.value)
