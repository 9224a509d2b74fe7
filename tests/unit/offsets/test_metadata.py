from __future__ import annotations

import base64
import random
import tracemalloc
import zlib
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keylane.offsets import metadata as metadata_module
from keylane.offsets.identity import TopicIdentity
from keylane.offsets.metadata import METADATA_BYTES_MAX, Committed, decode, encode, judge, stamp
from keylane.offsets.offset_set import BLOCK_OFFSETS, OffsetBlock, OffsetSet
from keylane.offsets.watermark import PartitionProgress, Watermark

RECORD = 900_000
"""Characters that a record of the state topic takes."""


@st.composite
def progresses(draw: st.DrawFn, most: int = 300) -> PartitionProgress:
    """Any progress there can be: dense, sparse, far apart, empty."""
    watermark = draw(st.one_of(st.integers(0, 2**62), st.sampled_from([0, BLOCK_OFFSETS - 1, BLOCK_OFFSETS])))
    gaps = draw(
        st.lists(
            st.one_of(
                st.integers(1, 4),
                st.integers(1, 10**7),
                st.sampled_from([BLOCK_OFFSETS - 1, BLOCK_OFFSETS, 2**40]),
            ),
            max_size=most,
        )
    )
    if not gaps:
        return PartitionProgress(watermark=watermark, position=watermark)
    pending = [watermark]
    for gap in gaps:
        pending.append(pending[-1] + gap)
    position = pending.pop()
    return PartitionProgress(watermark=watermark, position=position, pending=OffsetSet.of(pending))


def crowded(count: int, seed: int = 1, per: int = 10) -> PartitionProgress:
    """One that compresses badly."""
    rng = random.Random(seed)
    pending = {0, *rng.sample(range(1, count * per), count)}
    return PartitionProgress(watermark=0, position=count * per, pending=OffsetSet.of(pending))


def assert_skips_nothing(restored: PartitionProgress, of: PartitionProgress) -> None:
    """What is done according to ``restored`` was done."""
    assert restored.watermark == of.watermark
    assert restored.position <= of.position
    assert list(restored.pending) == [offset for offset in of.pending if offset < restored.position]


@given(progresses())
def test_encoding_round_trips(progress: PartitionProgress) -> None:
    restored = decode(progress.watermark, encode(progress))
    assert restored.problem is None
    assert restored.progress == progress


@pytest.mark.parametrize("per", [1.001, 1.1, 2, 5, 11, 31, 33, 100, 300, 20_000])
def test_metadata_of_any_density_is_compact(per: float) -> None:
    count = min(70_000, int(400_000 / per))
    span = int(count * per)
    pending = {0, *random.Random(7).sample(range(1, span), count - 1)}
    progress = PartitionProgress(watermark=0, position=span, pending=OffsetSet.of(pending))
    text = encode(progress)
    assert decode(0, text).progress == progress
    assert len(text) < 60 + count * (11 if per > 1000 else 1.6 * max(1.0, per**0.5))


@pytest.mark.parametrize(
    "pending", [range(5000), range(0, 150_000, 2), [*range(3000), *range(60_000, 140_000)]]
)
def test_runs_of_offsets_take_little_space(pending: list[int]) -> None:
    progress = PartitionProgress(watermark=0, position=200_000, pending=OffsetSet.of(pending))
    text = encode(progress)
    assert len(text) < 500
    assert decode(0, text).progress == progress


def test_an_offset_with_nothing_above_it_needs_no_metadata() -> None:
    assert encode(PartitionProgress(watermark=5, position=5)) == ""
    for nothing in ("", None):
        restored = decode(5, nothing)
        assert restored.problem is None
        assert restored.progress == PartitionProgress(watermark=5, position=5)


@given(progresses(), st.integers(0, 400))
def test_a_limit_is_kept_and_only_more_runs_again(progress: PartitionProgress, limit: int) -> None:
    text = encode(progress, limit)
    assert len(text) <= limit
    restored = decode(progress.watermark, text)
    assert restored.problem is None
    assert_skips_nothing(restored.progress, progress)


@pytest.mark.parametrize("per", [2, 10, 100])
@pytest.mark.parametrize("count", [3000, 30_000])
def test_crowded_progress_is_cut_to_the_limit_and_uses_it(count: int, per: int) -> None:
    progress = crowded(count, per=per)
    assert len(encode(progress)) > METADATA_BYTES_MAX / 4
    text = encode(progress, METADATA_BYTES_MAX)
    assert len(text) <= METADATA_BYTES_MAX
    restored = decode(0, text).progress
    assert_skips_nothing(restored, progress)
    assert len(text) > 0.95 * METADATA_BYTES_MAX or restored == progress, "room is not wasted"


def test_a_stuck_lane_with_a_million_done_behind_it_fits() -> None:
    progress = PartitionProgress(watermark=10, position=50_000_000, pending=OffsetSet.of([10]))
    assert len(encode(progress)) < 40
    assert decode(10, encode(progress)).progress == progress


def scattered(offsets: int, per: int) -> PartitionProgress:
    """One in this many of these offsets, anywhere."""
    rng = random.Random(3)
    kinds = [sorted({0, *rng.sample(range(BLOCK_OFFSETS), BLOCK_OFFSETS // per)}) for _ in range(8)]
    blocks = [OffsetBlock.of(number, kinds[number % 8]) for number in range(offsets // BLOCK_OFFSETS)]
    return PartitionProgress(watermark=0, position=len(blocks) * BLOCK_OFFSETS, pending=OffsetSet(blocks))


def test_metadata_of_a_million_pending_offsets_fits() -> None:
    progress = scattered(11_000_000, 11)
    assert len(progress.pending) > 990_000
    text = encode(progress, RECORD)
    assert len(text) <= RECORD
    restored = decode(0, text)
    assert restored.problem is None
    assert restored.progress == progress


def test_too_large_progress_is_cut_at_the_top() -> None:
    progress = scattered(30_000_000, 11)
    text = encode(progress, RECORD)
    assert 0.99 * RECORD < len(text) <= RECORD
    restored = decode(0, text).progress
    assert restored.position > 11_000_000
    assert_skips_nothing(restored, progress)


def test_only_changed_blocks_are_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    pack = metadata_module._packed

    def counted(block: OffsetBlock) -> bytes:
        packed.append(block.number)
        return pack(block)

    monkeypatch.setattr(metadata_module, "_packed", counted)
    mark = Watermark(PartitionProgress(watermark=0, position=0))
    for start in range(0, 3_000_000, 11_000):
        mark.deliver(range(start, start + 11_000, 11))
    encode(mark.progress())
    assert len(set(packed)) == 46
    packed.clear()
    mark.deliver(range(3_000_000, 3_011_000, 11))
    mark.done([11 * 10_000])
    progress = mark.progress()
    text = encode(progress)
    assert len(packed) < 8, "one block of the lane that moved, and those of what came last"
    again = Watermark(decode(0, text).progress)
    packed.clear()
    assert encode(again.progress()) == text
    assert not packed, "not even after a restart"


def test_metadata_is_ascii() -> None:
    assert encode(crowded(500)).isascii()


@pytest.mark.parametrize("metadata", ["kl2:dAAAA", "kl99:", "kl2"])
def test_a_newer_version_is_named_and_only_the_watermark_counts(metadata: str) -> None:
    restored = decode(9, metadata)
    assert restored.progress == PartitionProgress(watermark=9, position=9)
    assert restored.problem is not None
    assert "a newer version" in restored.problem


@pytest.mark.parametrize("metadata", ["consumed by flink", "{}", "kl", "klx:d", "\x00", "KL1:d", " kl1:d"])
def test_metadata_of_another_program_keeps_the_offset_only(metadata: str) -> None:
    restored = decode(9, metadata)
    assert restored.progress == PartitionProgress(watermark=9, position=9)
    assert restored.problem is not None
    assert "another program" in restored.problem


@given(
    st.integers(0, 2**63 - 1),
    st.one_of(st.text(), st.text().map("kl1:".__add__), st.from_regex(r"kl1:[A-Za-z0-9+/@]*={0,2}")),
)
@example(5, "kl1:")
@example(5, "kl1:@")
@example(5, "kl1:d")
@example(5, "kl1:AAAA")
@example(5, "kl1:AAAAAA==")
@example(5, "kl1:é")
def test_garbage_never_raises_and_never_skips(watermark: int, metadata: str) -> None:
    restored = decode(watermark, metadata)
    assert restored.progress == PartitionProgress(watermark=watermark, position=watermark)
    assert (restored.problem is None) == (metadata == "")


@given(progresses(most=40).filter(lambda p: p.pending), st.data())
def test_metadata_with_one_character_changed_never_skips(
    progress: PartitionProgress, data: st.DataObject
) -> None:
    text = encode(progress)
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters())
    restored = decode(progress.watermark, text[:place] + other + text[place + 1 :])
    # The last character of base64 has bits that mean nothing: the same progress may come of another text.
    assert restored.progress in (
        progress,
        PartitionProgress(watermark=progress.watermark, position=progress.watermark),
    )


@given(progresses(most=40).filter(lambda p: p.pending), st.data())
def test_metadata_that_was_cut_off_never_skips(progress: PartitionProgress, data: st.DataObject) -> None:
    text = encode(progress)
    restored = decode(progress.watermark, text[: data.draw(st.integers(0, len(text) - 1))])
    assert restored.progress == PartitionProgress(watermark=progress.watermark, position=progress.watermark)


@given(progresses(most=40).filter(lambda p: p.pending), st.integers(0, 2**62))
def test_metadata_beside_another_offset_never_skips(progress: PartitionProgress, other: int) -> None:
    """Tools that copy groups between clusters translate the offset and copy the metadata."""
    if other == progress.watermark:
        other += 1
    restored = decode(other, encode(progress))
    assert restored.progress == PartitionProgress(watermark=other, position=other)
    assert restored.problem is not None
    assert "belongs to another offset" in restored.problem


def signed(content: bytes, watermark: int = 7) -> str:
    """A text with the right checksum, whatever it says."""
    checksum = zlib.crc32(content, zlib.crc32(f"{watermark} ".encode())).to_bytes(4, "little")
    return f"kl1:{base64.b64encode(checksum + content).decode()}"


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def deflated(raw: bytes) -> bytes:
    return zlib.compress(raw, 9)[2:-4]


def piece(step: int, form: int, content: bytes) -> bytes:
    """A block as it is encoded in the text."""
    content = deflated(content) if form & 1 else content
    return varint(step) + varint(len(content) << 3 | form) + content


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """What a newer writer with an error, or an attacker, might have written."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.binary(max_size=200))
    raws = st.one_of(
        st.binary(max_size=60), st.binary(min_size=8192, max_size=8192), st.just(b"\0" * 8191 + b"\x01")
    )
    parts = [
        piece(draw(st.integers(0, 3)), draw(st.integers(0, 7)), draw(raws))
        for _ in range(draw(st.integers(0, 4)))
    ]
    whole = varint(draw(st.integers(0, 2**66))) + b"".join(parts)
    return whole[: draw(st.integers(len(whole) // 2, len(whole)))] if draw(st.booleans()) else whole


@given(contents())
@settings(max_examples=400, deadline=None)
@example(varint(1) + piece(0, 0, b"\x07"))
@example(varint(100_000) + piece(0, 2, b"\x07\x01" + b"\x00\x01"))
def test_metadata_with_valid_checksum_never_raises(content: bytes) -> None:
    restored = decode(7, signed(content))
    progress = restored.progress
    if restored.problem is not None:
        assert progress == PartitionProgress(watermark=7, position=7)
    else:
        pending = list(progress.pending)
        assert pending[0] == progress.watermark == 7
        assert pending == sorted(set(pending))
        assert pending[-1] < progress.position <= 2**63
        assert progress.pending == OffsetSet.of(pending)
        assert decode(7, encode(progress)).progress == progress


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (varint(9), "no pending offset"),
        (varint(9) + piece(0, 0, b""), "too few"),
        (varint(9) + piece(0, 1, b""), "too few"),
        (varint(9) + piece(0, 0, b"\x07" + b"\0" * 5000), "too many"),
        (varint(9) + piece(0, 0, b"\x07\x01\x01")[:-1], "middle of a block"),
        (varint(9) + piece(0, 0, b"\x08"), "do not fit"),
        (varint(2) + piece(0, 0, b"\x07\x01"), "do not fit"),
        (varint(2**69) + piece(0, 0, b"\x07"), "do not fit"),
        (b"\x80" * 12 + piece(0, 0, b"\x07"), "too long"),
        (varint(99) + piece(0, 2, b"\x07\x01\0"), "too many, too few"),
        (varint(99) + piece(0, 2, b"\xff\xff" * 4), "too large"),
        (varint(99) + piece(0, 0, b"\x07") + piece(0, 0, b"\x09"), "do not ascend"),
        (varint(99) + piece(0, 4, b"\x80"), "wrong size"),
        (varint(99) + piece(0, 4, b"\0" * 8192), "is empty"),
        (varint(99) + piece(0, 6, b"\x07"), "unknown form"),
        (varint(99) + varint(0) + varint(3 << 3 | 1) + b"abc", "damaged"),
        (varint(99) + varint(0) + varint(9 << 3 | 1) + (deflated(b"\x07") + b"x" * 9)[:9], "not whole"),
        (varint(99) + piece(0, 5, b"\x80" + b"\0" * (64 << 20)), "not whole"),
    ],
)
def test_malformed_metadata_is_reported(content: bytes, words: str) -> None:
    restored = decode(7, signed(content))
    assert restored.progress == PartitionProgress(watermark=7, position=7)
    assert restored.problem is not None
    assert words in restored.problem


def test_a_text_cannot_make_us_hold_more_than_is_ever_written() -> None:
    bomb = varint(2**50) + piece(0, 5, b"\x80" + b"\xff" * 8191) + 40_000 * piece(1, 5, b"\xff" * 8192)
    text = signed(bomb)
    assert len(text) < 2_000_000
    tracemalloc.start()
    try:
        restored = decode(7, text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert restored.problem is not None
    assert "more pending offsets than are ever written" in restored.problem
    assert peak < 100 << 20


def test_written_metadata_is_always_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_module, "BLOCK_BYTES_MAX", 20_000)
    progress = PartitionProgress(watermark=0, position=10**7, pending=OffsetSet.of(range(0, 10**7, 1000)))
    restored = decode(0, encode(progress))
    assert restored.problem is None
    assert 10 * BLOCK_OFFSETS < restored.progress.position < progress.position
    assert_skips_nothing(restored.progress, progress)


SOURCE = TopicIdentity(cluster="c1", topic="in", id="t1")


@pytest.mark.parametrize("text", ["kl1:-", "kl1:@", "kl1:/", "kl1:AAAA"])
def test_judge_takes_the_text_of_its_own_topic(text: str) -> None:
    assert judge(7, stamp(text, SOURCE), SOURCE) == Committed(offset=7, text=text)


def test_judge_refuses_an_offset_of_a_recreated_topic() -> None:
    assert judge(7, stamp("kl1:-", replace(SOURCE, id="t0")), SOURCE) is None


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ("", None),
        (None, None),
        ("flink-17", "another program"),
        ("kl1:-", "damaged"),
        (encode(PartitionProgress(watermark=7, position=9, pending=OffsetSet.of([7]))), "names no topic"),
        ("kl1:- c2/t1", "was copied here"),
    ],
)
def test_judge_takes_only_the_offset_where_others_wrote_it(metadata: str | None, problem: str | None) -> None:
    found = judge(7, metadata, SOURCE)
    assert found is not None
    assert (found.offset, found.text) == (7, None)
    assert (found.problem is None) if problem is None else problem in str(found.problem)


@given(st.text(max_size=80))
def test_judge_never_raises(metadata: str) -> None:
    found = judge(7, metadata, SOURCE)
    assert found is None or found.offset == 7
