from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane import Idempotency, SettingsError
from keylane.policies.dedup_window import ID_BYTES_MAX, DedupWindow

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


def window_of(rule: Idempotency) -> DedupWindow:
    return DedupWindow(rule)


def feed(window: DedupWindow, messages: list[Arrival], together: int = 1) -> list[int | None]:
    """Its answer for each; this many at once if all are new."""
    found: list[int | None] = []
    for place in range(0, len(messages), together):
        some = messages[place : place + together]
        ids, offsets = [each.event_id for each in some], [each.offset for each in some]
        times, keys = [each.at for each in some], [each.key for each in some]
        if together > 1 and window.add_if_all_new((ids, offsets, times, keys)):
            found += [None] * len(some)
        else:
            found += [window.add(each.key, each.event_id, each.offset, each.at) for each in some]
    return found


@given(settings, arrivals(), st.integers(1, 5))
def test_window_equals_the_whole_log(rule: Idempotency, messages: list[Arrival], together: int) -> None:
    window = window_of(rule)
    expected = [naive(rule, messages[:place], each) for place, each in enumerate(messages)]
    assert feed(window, messages, together) == expected
    assert len(window) < 2.5 * rule.count


@given(settings, arrivals(), st.integers(0, 120))
def test_dedup_window_rebuilt_gives_the_same_answers(
    rule: Idempotency, messages: list[Arrival], watermark: int
) -> None:
    live, rebuilt = window_of(rule), window_of(rule)
    feed(live, [each for each in messages if each.offset < watermark])
    feed(rebuilt, [each for each in messages if rule.since(watermark) <= each.offset < watermark])
    rest = [each for each in messages if each.offset >= watermark]
    assert feed(live, rest) == feed(rebuilt, rest)


@given(settings, arrivals(), st.integers(1, 5))
def test_first_is_where_the_chain_of_repeats_begins(
    rule: Idempotency, messages: list[Arrival], together: int
) -> None:
    window, first = window_of(rule), dict[int, int]()
    for place, each in enumerate(messages):
        repeats = naive(rule, messages[:place], each)
        first[each.offset] = each.offset if repeats is None else first[repeats]
    feed(window, messages, together)
    for each in {(message.key, message.event_id): message for message in messages}.values():
        if messages[-1].offset - each.offset < rule.count:
            assert window.first(each.key, each.event_id) == first[each.offset]


def test_dedup_window_rebuild_starts_before_the_watermark() -> None:
    assert Idempotency(count=10).since(100) == 90
    assert Idempotency(count=10).since(3) == 0


def test_key_and_event_id_cannot_be_mistaken_for_each_other() -> None:
    window = window_of(Idempotency())
    assert window.add(b"ab", b"c", 0, None) is None
    assert window.add(b"a", b"bc", 1, None) is None
    assert window.add(b"", b"abc", 2, None) is None
    assert window.add(b"ab", b"c", 3, None) == 0


def test_dedup_window_reread_message_is_not_a_duplicate() -> None:
    window = window_of(Idempotency())
    assert window.add(A, b"1", 5, None) is None
    assert window.add(A, b"1", 5, None) is None
    assert window.add(A, b"1", 4, None) is None


def test_ids_of_any_length_take_bounded_room() -> None:
    window = window_of(Idempotency())
    for key, event_id in ((A, b"x" * ID_BYTES_MAX), (b"x" * ID_BYTES_MAX, b"1")):
        assert window.add(key, event_id, 0, None) is None
        assert window.add(key, event_id, 1, None) is None
    assert len(window) == 0
    window.add(A, b"x" * (ID_BYTES_MAX - 1), 2, None)
    assert window.add(A, b"x" * (ID_BYTES_MAX - 1), 3, None) == 2


def test_messages_that_never_ran_are_forgotten() -> None:
    window = window_of(Idempotency(count=2))
    feed(window, [Arrival(0, A, b"1", None), Arrival(1, A, b"2", None), Arrival(2, A, b"3", None)])
    window.forget({1, 2, 99})
    assert window.add(A, b"1", 2, None) == 0
    assert window.add(A, b"2", 3, None) is None
    assert window.add(A, b"3", 4, None) is None


def test_dedup_window_keeps_an_id_of_other_lanes() -> None:
    window = window_of(Idempotency())
    feed(window, [Arrival(0, A, b"1", None), Arrival(1, B, b"1", None)])
    window.forget({0})
    assert not window.add_if_all_new(([b"1"], [2], [None], [B]))
    assert window.add(B, b"1", 2, None) == 1
    assert window.add(A, b"1", 3, None) is None


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"count": 0}, "Idempotency(count=0): expected a whole number of messages, at least 1"),
        ({"count": 10.0}, "Idempotency(count=10.0)"),
        ({"count": True}, "Idempotency(count=True)"),
        ({"count": "10"}, "Idempotency(count='10')"),
        ({"age": 0}, "Idempotency(age=0): expected seconds, more than 0"),
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
