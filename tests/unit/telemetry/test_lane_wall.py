"""Lanes packed for one record of telemetry."""

from __future__ import annotations

import base64
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.lanes.lane_table import LaneState
from keylane.strict_json import MalformedRecordError
from keylane.telemetry.lane_wall import LANES_MAX, STATES, pack, unpack
from keylane.telemetry.snapshot import decode
from support.snapshots import snapshot

LANES = st.lists(st.tuples(st.integers(0, 65_535), st.sampled_from(LaneState)))


@given(LANES)
def test_lanes_come_back_as_they_were(lanes: list[tuple[int, LaneState]]) -> None:
    found = unpack(pack(lanes))
    rows = [found[at : at + 3] for at in range(0, len(found), 3)]
    assert [(int.from_bytes(row[:2], "little"), STATES[row[2]]) for row in rows] == lanes


def test_record_of_many_lanes_stays_small() -> None:
    many = [(number * 7 % 65_536, STATES[number % 3]) for number in range(LANES_MAX + 100)]
    text = pack(many)
    assert len(unpack(text)) == 3 * LANES_MAX
    assert len(text) < 500_000


@pytest.mark.parametrize(
    "content",
    [b"\x00\x00", b"\x00\x00\xff", bytes(3 * LANES_MAX + 3)],
    ids=["part of a lane", "unknown state", "too many"],
)
def test_wrong_content_is_refused(content: bytes) -> None:
    with pytest.raises(MalformedRecordError):
        unpack(base64.b64encode(zlib.compress(content)).decode())


@pytest.mark.parametrize("text", ["?", "AAAA", base64.b64encode(b"x" * 30).decode()])
def test_text_that_is_no_packed_lanes_is_refused(text: str) -> None:
    with pytest.raises(MalformedRecordError):
        unpack(text)


def test_snapshot_has_a_wall_only_when_somebody_looks() -> None:
    assert b"wall" not in snapshot().encode()
    assert decode(snapshot().encode()).wall == ""
    packed = pack([(7, LaneState.RUNNING)])
    assert decode(snapshot(wall=packed).encode()).wall == packed
