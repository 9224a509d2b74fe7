from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.core.versions import Fits, Mark, Versioned, after, decode_mark
from keylane.engine.versionstore import VersionStore

NAMES = st.tuples(st.integers(0, 2), st.sampled_from([b"", b"a", b"b", b"c\x00", b"\xff", b"key"]))
MARKS = st.builds(Mark, st.integers(0, 2**63 - 1), st.integers(-1, 2**63 - 1))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(NAMES, MARKS, st.integers(0, 50)), max_size=60), st.integers(1, 5))
def test_it_answers_as_a_dict_would(puts: list[tuple[tuple[int, bytes], Mark, int]], recent: int) -> None:
    store = VersionStore(recent=recent)
    known: dict[tuple[int, bytes], tuple[Mark, int]] = {}
    for name, mark, offset in puts:
        assert store.get(name) == (known[name][0] if name in known else None)
        store.put(name, mark, offset)
        known[name] = mark, offset
    assert all(store.get(name) == mark for name, (mark, _) in known.items())
    forgotten = {name for name, (_, offset) in known.items() if name[0] == 1 and offset >= 10 and offset % 2}
    assert store.keep_done(1, 10, lambda _key, offset: offset % 2 == 0) == len(forgotten)
    for name, (mark, _) in known.items():
        assert store.get(name) == (None if name in forgotten else mark)


def test_a_mark_survives_the_state_topic() -> None:
    assert decode_mark(Mark(7, -1).encode(12)) == (Mark(7, -1), 12)


def test_how_versions_fit() -> None:
    rule, any_first = Versioned(), Versioned(first=None)
    assert [rule.judge(v, None) for v in (0, 1, 2)] == [Fits.NEXT, Fits.NEXT, Fits.GAP]
    assert any_first.judge(99, None) is Fits.NEXT
    mark = Mark(5, 3)
    assert [rule.judge(v, mark) for v in (4, 5, 6, 7)] == [Fits.STALE, Fits.STALE, Fits.NEXT, Fits.GAP]
    redriven = [rule.judge(v, mark, redriven=True) for v in (3, 4, 5, 6, 7)]
    assert redriven == [Fits.STALE, Fits.NEXT, Fits.NEXT, Fits.NEXT, Fits.GAP]
    assert after(None, 3, applied=False) == Mark(3, -1)
    assert after(Mark(5, 3), 4, applied=True) == Mark(5, 4)
    assert (rule.missing(None), rule.missing(mark), any_first.missing(None)) == (1, 6, None)
