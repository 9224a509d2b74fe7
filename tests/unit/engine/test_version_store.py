from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.engine.version_store import Moves, VersionStore
from keylane.offsets.murmur2 import partition_of
from keylane.offsets.slots import ALL, SLOTS, Slots, slot_of
from keylane.policies.versions import VersionFit, VersionMark, VersionOrdering, decode_mark, mark_at, set_back

NAMES = st.tuples(st.integers(0, 2), st.sampled_from([b"", b"a", b"b", b"c\x00", b"\xff", b"key"]))
NUMBERS = st.integers(0, 2**63 - 1)
REST = st.just(-1), st.just(b""), st.just(b""), st.just(b"")
MARKS = st.builds(VersionMark, NUMBERS, st.integers(-1, 2**63 - 1), st.integers(-1, 50), *REST)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(NAMES, st.none() | MARKS), max_size=60), st.integers(1, 5))
def test_it_answers_as_a_dict_would(
    puts: list[tuple[tuple[int, bytes], VersionMark | None]], recent: int
) -> None:
    store = VersionStore(recent=recent)
    known: dict[tuple[int, bytes], VersionMark] = {}
    for name, mark in puts:
        assert store.get(name) == known.get(name)
        if mark is None:
            store.forget(name)
            known.pop(name, None)
        else:
            store.put(name, mark)
            known[name] = mark
    assert all(store.get(name) == mark for name, mark in known.items())
    moved: list[tuple[tuple[int, bytes], VersionMark]] = []
    while more := store.moved(moved[-1][0] if moved else (-1, b""), 2):
        moved += more
    assert moved == sorted((name, mark) for name, mark in known.items() if mark.offset < 0)


RULE, ANY_FIRST = VersionOrdering(), VersionOrdering(first=None)


def marked(*versions: int, rule: VersionOrdering = RULE) -> VersionMark:
    """The mark when these versions ran, each at the offset of its place."""
    mark = None
    for offset, version in enumerate(versions):
        mark = rule.after(mark, version, offset, applied=True)
    assert mark is not None
    return mark


def test_store_sets_back_versions_that_run_again() -> None:
    store = VersionStore(recent=2)
    for name in ((0, b"a"), (0, b"b"), (1, b"a")):
        store.put(name, marked(1, 2, 3, 4))
    store.put((0, b"c"), marked(1, 2))
    assert store.set_back(0, 2, lambda _key, offset: offset < 2) == 2
    found = {name: store.get(name) for name in ((0, b"a"), (0, b"b"), (0, b"c"), (1, b"a"))}
    assert {name: mark and mark.passed for name, mark in found.items()} == {
        (0, b"a"): 2,
        (0, b"b"): 2,
        (0, b"c"): 2,
        (1, b"a"): 4,
    }
    assert store.set_back(1, 0, lambda _key, _offset: False) == 1
    assert store.get((1, b"a")) is None


@given(
    st.builds(
        VersionMark,
        NUMBERS,
        st.integers(-1, 2**63 - 1),
        st.integers(-1, 2**63 - 1),
        st.integers(-1, 2**63 - 1),
        st.sampled_from([b"", b"3:17", b"3:17,4!18,5:-1"]),
        st.sampled_from([b"", b"5-7", b"5-7,9-9"]),
        st.sampled_from([b"", b"7:2"]),
    )
)
def test_a_mark_survives_the_state_topic(mark: VersionMark) -> None:
    assert decode_mark(mark.encode()) == mark


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"7 7 0",
        b"7 7 0 0 - -",
        b"x 7 0 0 - - -",
        b"-5 7 0 0 - - -",
        b"7 7 0 0 3 - -",
        b"7 7 0 0 - 5 -",
        b"9999999999999999999 7 0 0 - - -",
        b"7 7 0 0 - - - ",
    ],
)
def test_invalid_mark_is_a_value_error(value: bytes) -> None:
    with pytest.raises(ValueError, match="expected a version mark"):
        decode_mark(value)


def test_how_versions_fit() -> None:
    assert [RULE.judge(v, None) for v in (0, 1, 2)] == [VersionFit.NEXT, VersionFit.NEXT, VersionFit.GAP]
    assert ANY_FIRST.judge(99, None) is VersionFit.NEXT
    mark = VersionMark(5, 3)
    assert [RULE.judge(v, mark) for v in (4, 5, 6, 7)] == [
        VersionFit.STALE,
        VersionFit.STALE,
        VersionFit.NEXT,
        VersionFit.GAP,
    ]
    redriven = [RULE.judge(v, mark, redriven=True) for v in (3, 4, 5, 6, 7)]
    assert redriven == [VersionFit.STALE, VersionFit.NEXT, VersionFit.NEXT, VersionFit.NEXT, VersionFit.GAP]
    assert (RULE.missing(None), RULE.missing(mark), ANY_FIRST.missing(None)) == (1, 6, None)


def test_version_too_far_ahead_differs_from_a_gap() -> None:
    rule = VersionOrdering(max_gap=10)
    assert [rule.judge(v, VersionMark(5, 5)) for v in (6, 7, 16, 17, 2**63 - 1)] == [
        VersionFit.NEXT,
        VersionFit.GAP,
        VersionFit.GAP,
        VersionFit.FAR,
        VersionFit.FAR,
    ]
    assert [rule.judge(v, None) for v in (11, 12)] == [VersionFit.GAP, VersionFit.FAR]
    assert VersionOrdering(max_gap=None).judge(2**63 - 1, VersionMark(5, 5)) is VersionFit.GAP


def test_a_version_given_up_is_late_until_it_came() -> None:
    mark = RULE.after(marked(1, 2), 6, 2, applied=False)
    mark = RULE.after(mark, 7, 3, applied=True)
    assert [RULE.judge(v, mark) for v in range(1, 9)] == [
        *[VersionFit.STALE] * 2,
        *[VersionFit.LATE] * 3,
        *[VersionFit.STALE] * 2,
        VersionFit.NEXT,
    ]
    mark = RULE.after(mark, 4, 4, applied=False)
    assert [RULE.judge(v, mark) for v in (3, 4, 5)] == [VersionFit.LATE, VersionFit.STALE, VersionFit.LATE]


def test_version_that_ran_replaces_missing_ones() -> None:
    mark = marked(1, 2, 6)
    assert [RULE.judge(v, mark) for v in (3, 4, 5)] == [VersionFit.STALE] * 3


def test_many_gaps_take_bounded_room_and_forget_no_version() -> None:
    mark = marked(1)
    for version in range(3, 203, 2):
        mark = RULE.after(mark, version, version, applied=False)
    assert len(mark.encode()) < 400
    assert all(RULE.judge(version, mark) is VersionFit.LATE for version in range(2, 202, 2))


def test_a_mark_has_a_bounded_trail() -> None:
    mark = marked(*range(1, 1000))
    assert (mark.passed, mark.offset, mark.began) == (999, 998, 0)
    assert len(mark.encode()) < 150


# A rewind.


def test_rewind_expects_versions_that_run_again() -> None:
    mark = marked(1, 2, 3, 4)
    for offset in range(1, 4):
        before = set_back(mark, lambda at, offset=offset: at < offset)  # type: ignore[misc]
        assert before is not None
        assert (before.passed, before.applied) == (offset, offset)
    assert set_back(mark, lambda at: at < 4) == mark
    assert set_back(mark, lambda _at: False) is None


def test_version_store_does_not_wait_for_versions_that_ran() -> None:
    """3 is before 2 in the log: 2 runs again, 3 does not, and 4 is next."""
    mark = RULE.after(
        RULE.after(RULE.after(None, 1, 0, applied=True), 2, 2, applied=True), 3, 1, applied=True
    )
    before = set_back(mark, lambda at: at < 2)
    assert before is not None
    assert [RULE.judge(v, before) for v in (1, 2, 3, 4)] == [
        VersionFit.STALE,
        VersionFit.NEXT,
        VersionFit.STALE,
        VersionFit.GAP,
    ]
    restored = decode_mark(before.encode())
    after = RULE.after(restored, 2, 2, applied=True)
    assert [RULE.judge(v, after) for v in (2, 3, 4)] == [VersionFit.STALE, VersionFit.STALE, VersionFit.NEXT]
    assert after == mark


def test_rewind_beyond_the_trail_accepts_the_first_version() -> None:
    mark = marked(*range(1, 100))
    before = set_back(mark, lambda at: at < 20)
    assert [RULE.judge(v, before) for v in (1, 21, 90, 91, 95)] == [
        *[VersionFit.NEXT] * 3,
        VersionFit.GAP,
        VersionFit.GAP,
    ]
    after = RULE.after(before, 21, 20, applied=True)
    assert [RULE.judge(v, after) for v in (20, 21, 22, 23)] == [
        VersionFit.STALE,
        VersionFit.STALE,
        VersionFit.NEXT,
        VersionFit.GAP,
    ]
    assert set_back(mark, lambda _at: False) is None, "all of it runs again"


def test_a_rewind_of_the_largest_versions_can_be_stored() -> None:
    store = VersionStore(recent=1)
    store.put((0, b"a"), marked(*range(2**63 - 20, 2**63), rule=ANY_FIRST))
    assert store.set_back(0, 5, lambda _key, at: at < 5) == 1
    assert ANY_FIRST.judge(2**63 - 15, store.get((0, b"a"))) is VersionFit.NEXT


MESSAGES = st.lists(
    st.tuples(st.integers(1, 12) | st.sampled_from([2**63 - 1, 5000]), st.booleans()), max_size=12
)


@settings(max_examples=600, deadline=None)
@given(
    MESSAGES,
    st.integers(0, 12),
    MESSAGES,
    st.sampled_from([1, None]),
    st.sampled_from(["process", "fail"]),
)
def test_marks_agree_with_a_model_that_forgets_nothing(
    log: list[tuple[int, bool]], rewind: int, more: list[tuple[int, bool]], first: int | None, on_gap: str
) -> None:
    """What runs, before and after a rewind, is what a model decides that keeps the whole history."""
    rule = VersionOrdering(first=first, on_gap=on_gap, max_gap=100)  # type: ignore[arg-type]
    begins: list[int | None] = []  # how far the entity was before each message
    passed: int | None = None

    def model(version: int, fails: bool) -> str:
        nonlocal passed
        begins.append(passed)
        expected = first if passed is None else passed + 1
        if passed is not None and version <= passed:
            return "not run"
        if expected is not None and version > expected + 100:
            return "not run"
        if expected is not None and version > expected and on_gap == "fail":
            passed = version
            return "not run"
        passed = version
        return "died" if fails else "ran"

    mark: VersionMark | None = None
    traced: set[int] = set()  # versions that ran, or have a letter

    def real(version: int, offset: int, fails: bool) -> str:
        nonlocal mark
        fits = rule.judge(version, mark)
        if fits in (VersionFit.STALE, VersionFit.FAR):
            assert fits is VersionFit.FAR or on_gap == "process" or first is None or version in traced
            return "not run"
        traced.add(version)
        if fits is VersionFit.LATE or (fits is VersionFit.GAP and on_gap == "fail"):
            mark = rule.after(mark, version, offset, applied=False)
            return "not run"
        mark = rule.after(mark, version, offset, applied=not fails)
        return "died" if fails else "ran"

    for offset, (version, fails) in enumerate(log):
        assert real(version, offset, fails) == model(version, fails), (offset, version)
        assert mark is None or decode_mark(mark.encode()) == mark
    rewind = min(rewind, len(log))
    passes = len({version for version, _ in log})
    if rewind < len(log) and passes <= 10:
        passed = begins[rewind]
        if mark is not None:
            mark = set_back(mark, lambda at: at < rewind)
        for offset, (version, fails) in [*enumerate(log)][rewind:] + [
            (len(log) + place, one) for place, one in enumerate(more)
        ]:
            assert real(version, offset, fails) == model(version, fails), (offset, version)


# Keys that move.


KEYS = [b"k%d" % number for number in range(40)]


def test_a_mark_moves_with_its_key() -> None:
    moves = Moves(3, {0: ALL, 1: ALL, 2: ALL})
    for key in KEYS:
        moves.put(partition_of(key, 2), key, marked(1, 2, 3), 1)
    for key in KEYS:
        home, before = partition_of(key, 3), partition_of(key, 2)
        mark = moves.store.get((home, key))
        assert mark is not None
        assert (mark.passed, mark.offset) == (3, 2 if home == before else -1)
        assert moves.store.home(key) == home
        assert set_back(mark, lambda at: at < 0) == (mark if home != before else None)


def test_of_several_marks_of_a_key_the_last_written_counts() -> None:
    """From partition to partition and back again: marks left behind are old."""
    for key in KEYS:
        counts = (2, 3, 4)
        moves = Moves(4, {0: ALL, 1: ALL, 2: ALL, 3: ALL})
        records = {partition_of(key, count): count for count in counts}  # a later one takes the place
        for partition, count in sorted(records.items()):
            moves.put(partition, key, mark_at(count), count)
        mark = moves.store.get((partition_of(key, 4), key))
        assert mark is not None
        assert mark.passed == 4


def test_version_store_ignores_a_withdrawn_mark() -> None:
    moves = Moves(2, {0: ALL, 1: ALL})
    key = next(key for key in KEYS if partition_of(key, 2) == 1)
    moves.put(0, key, marked(1), 1)
    moves.put(1, key, None, 2)
    assert moves.store.get((1, key)) is None


def test_a_task_takes_only_keys_of_its_own_slots() -> None:
    half = Slots(0, SLOTS // 2)
    moves = Moves(2, {1: half})
    for key in KEYS:
        moves.put(0, key, marked(1), 1)
    for key in KEYS:
        own = partition_of(key, 2) == 1 and slot_of(key, 0) in half
        assert (moves.store.get((1, key)) is not None) == own
        assert moves.store.home(key) == (1 if own else None)
