from __future__ import annotations

import base64
import random
import zlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keylane.core.progress import LIMIT, decode, encode
from keylane.core.watermark import Progress


@st.composite
def progresses(draw: st.DrawFn, most: int = 300) -> Progress:
    """Any progress there can be: dense, sparse, far apart, empty."""
    watermark = draw(st.integers(0, 2**62))
    gaps = draw(st.lists(st.one_of(st.integers(1, 4), st.integers(1, 10**7)), max_size=most))
    if not gaps:
        return Progress(watermark=watermark, position=watermark)
    pending = [watermark]
    for gap in gaps:
        pending.append(pending[-1] + gap)
    position = pending.pop()
    return Progress(watermark=watermark, position=position, pending=tuple(pending))


def crowded(count: int, seed: int = 1) -> Progress:
    """One that compresses badly."""
    rng = random.Random(seed)
    pending = sorted({0, *rng.sample(range(1, count * 10), count)})
    return Progress(watermark=0, position=count * 10, pending=tuple(pending))


def assert_skips_nothing(restored: Progress, of: Progress) -> None:
    """What is done according to ``restored`` was done."""
    assert restored.watermark == of.watermark
    assert restored.position <= of.position
    kept = {offset for offset in of.pending if offset < restored.position}
    assert set(restored.pending) == kept


@given(progresses())
def test_what_was_encoded_is_decoded(progress: Progress) -> None:
    restored = decode(progress.watermark, encode(progress))
    assert restored.problem is None
    assert restored.progress == progress


def test_an_offset_with_nothing_above_it_needs_no_metadata() -> None:
    assert encode(Progress(watermark=5, position=5)) == ""
    for nothing in ("", None):
        restored = decode(5, nothing)
        assert restored.problem is None
        assert restored.progress == Progress(watermark=5, position=5)


@given(progresses(), st.integers(0, 400))
def test_a_limit_is_kept_and_only_more_runs_again(progress: Progress, limit: int) -> None:
    text = encode(progress, limit)
    assert len(text) <= limit
    restored = decode(progress.watermark, text)
    assert restored.problem is None
    assert_skips_nothing(restored.progress, progress)


@pytest.mark.parametrize("count", [3000, 30_000])
def test_crowded_progress_is_cut_to_the_limit_and_uses_it(count: int) -> None:
    progress = crowded(count)
    assert len(encode(progress)) > LIMIT / 2
    text = encode(progress, LIMIT)
    assert len(text) <= LIMIT
    restored = decode(0, text).progress
    assert_skips_nothing(restored, progress)
    assert len(text) > 0.95 * LIMIT or restored == progress, "room is not wasted"


def test_a_stuck_lane_with_a_million_done_behind_it_fits() -> None:
    progress = Progress(watermark=10, position=50_000_000, pending=(10,))
    assert len(encode(progress)) < 40
    assert decode(10, encode(progress)).progress == progress


def test_metadata_is_ascii() -> None:
    assert encode(crowded(500)).isascii()


@pytest.mark.parametrize("metadata", ["kl2:dAAAA", "kl99:", "kl2"])
def test_a_newer_version_is_named_and_only_the_watermark_counts(metadata: str) -> None:
    restored = decode(9, metadata)
    assert restored.progress == Progress(watermark=9, position=9)
    assert restored.problem is not None
    assert "a newer version" in restored.problem


@pytest.mark.parametrize("metadata", ["consumed by flink", "{}", "kl", "klx:d", "\x00", "KL1:d", " kl1:d"])
def test_metadata_of_another_program_is_named_and_only_the_watermark_counts(metadata: str) -> None:
    restored = decode(9, metadata)
    assert restored.progress == Progress(watermark=9, position=9)
    assert restored.problem is not None
    assert "another program" in restored.problem


@given(
    st.integers(0, 2**63 - 1),
    st.one_of(st.text(), st.text().map("kl1:".__add__), st.from_regex(r"kl1:[dDbB@x][A-Za-z0-9+/]*={0,2}")),
)
@example(5, "kl1:")
@example(5, "kl1:@")
@example(5, "kl1:d")
@example(5, "kl1:dAAAA")
@example(5, "kl1:Dé")
def test_garbage_never_raises_and_never_skips(watermark: int, metadata: str) -> None:
    restored = decode(watermark, metadata)
    assert restored.progress == Progress(watermark=watermark, position=watermark)
    assert (restored.problem is None) == (metadata == "")


@given(progresses(most=40).filter(lambda p: p.pending), st.data())
def test_metadata_with_one_character_changed_never_skips(progress: Progress, data: st.DataObject) -> None:
    text = encode(progress)
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters())
    restored = decode(progress.watermark, text[:place] + other + text[place + 1 :])
    # The last character of base64 has bits that mean nothing: the same progress may come of another text.
    assert restored.progress in (
        progress,
        Progress(watermark=progress.watermark, position=progress.watermark),
    )


@given(progresses(most=40).filter(lambda p: p.pending), st.data())
def test_metadata_that_was_cut_off_never_skips(progress: Progress, data: st.DataObject) -> None:
    text = encode(progress)
    restored = decode(progress.watermark, text[: data.draw(st.integers(0, len(text) - 1))])
    assert restored.progress == Progress(watermark=progress.watermark, position=progress.watermark)


@given(progresses(most=40).filter(lambda p: p.pending), st.integers(0, 2**62))
def test_metadata_beside_another_offset_never_skips(progress: Progress, other: int) -> None:
    """Tools that copy groups between clusters translate the offset and copy the metadata."""
    if other == progress.watermark:
        other += 1
    restored = decode(other, encode(progress))
    assert restored.progress == Progress(watermark=other, position=other)
    assert restored.problem is not None
    assert "belongs to another offset" in restored.problem


@given(st.sampled_from("dDbB"), st.binary(max_size=200))
@settings(max_examples=300)
def test_content_with_the_right_checksum_and_no_sense_never_raises(form: str, content: bytes) -> None:
    raw = zlib.compress(content) if form.isupper() else content
    checksum = zlib.crc32(raw, zlib.crc32(f"7 {form}".encode())).to_bytes(4, "little")
    restored = decode(7, f"kl1:{form}{base64.b64encode(checksum + raw).decode()}")
    progress = restored.progress
    if restored.problem is not None:
        assert progress == Progress(watermark=7, position=7)
    else:
        assert progress.pending[0] == progress.watermark == 7
        assert list(progress.pending) == sorted(set(progress.pending))
        assert progress.pending[-1] < progress.position


def test_a_deflated_bomb_is_refused() -> None:
    raw = zlib.compress(b"\x01" * (64 << 20), 9)
    checksum = zlib.crc32(raw, zlib.crc32(b"7 D")).to_bytes(4, "little")
    restored = decode(7, f"kl1:D{base64.b64encode(checksum + raw).decode()}")
    assert restored.problem is not None
    assert "not whole" in restored.problem
