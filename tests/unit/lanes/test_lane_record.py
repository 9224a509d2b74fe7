from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.lanes.lane_record import (
    KEYLESS,
    LANE,
    LaneRecord,
    LaneStatus,
    RetryState,
    decode_lane,
    decode_retries,
    encode_retries,
)
from keylane.offsets.offset_runs import OffsetRuns
from keylane.policies.failure_info import FailedAttempt, FailureInfo

TEXT = st.text(max_size=20)
NUMBER = st.integers(0, 2**50)
TIME = st.floats(0, 2e9, allow_nan=False)
FAILED = st.builds(FailedAttempt, stage=TEXT, attempt=st.integers(1, 99), at=TIME, error=TEXT)
LETTER = st.builds(
    FailureInfo,
    stage=TEXT,
    error=TEXT,
    message=TEXT,
    traceback=TEXT,
    attempts=NUMBER,
    failed_at=TIME,
    failures=st.lists(FAILED, max_size=3).map(tuple),
)
RECORD = st.builds(
    LaneRecord,
    stop=st.sampled_from(LaneStatus),
    key=st.none() | st.binary(max_size=12),
    partition=st.integers(0, 99),
    offset=NUMBER,
    since=TIME,
    letter=LETTER,
    why=TEXT,
)


@given(record=RECORD)
def test_a_lanes_record_comes_back_as_it_was_written(record: LaneRecord) -> None:
    assert decode_lane(record.name, record.partition, record.encode()) == record
    assert record.name.startswith(KEYLESS if record.key is None else LANE)


@pytest.mark.parametrize("value", [b"", b"{}", b"[]", b"7", b"null", b'{"stop": "tired"}', b"\xff"])
def test_invalid_lane_record_is_a_value_error(value: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        decode_lane(b"lane/a", 0, value)
    with pytest.raises(ValueError, match=r".*"):
        decode_lane(b"lane/a", 0, json.dumps({"stop": "parked", "offset": 1, "since": 1, "why": ""}).encode())


@given(
    kept=st.dictionaries(
        NUMBER,
        st.builds(
            RetryState,
            stage=TEXT,
            attempt=st.integers(1, 99),
            attempts=st.integers(1, 99),
            since=st.integers(0, 10**9).map(float),
            due=st.integers(0, 10**9).map(float),
            slot=st.integers(0, 65_535),
        ),
    )
)
def test_attempts_come_back_as_they_were_written(kept: dict[int, RetryState]) -> None:
    assert decode_retries(encode_retries(kept, 10**6)) == kept


def test_attempts_that_do_not_fit_are_left_out_at_the_top() -> None:
    kept = {
        offset: RetryState(stage="s", attempt=2, attempts=2, since=0.0, due=0.0) for offset in range(100_000)
    }
    value = encode_retries(kept, 900_000)
    assert len(value) < 900_000
    found = decode_retries(value)
    assert list(found) == list(range(len(found)))
    assert len(found) > 10_000


@pytest.mark.parametrize("value", [b"", b"{}x", b"[1]", b"[[1, 2]]", b'{"a": 1}', b'["x"]'])
def test_invalid_attempts_record_is_a_value_error(value: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        decode_retries(value)


@given(offsets=st.lists(st.integers(0, 60)))
def test_ranges_are_a_set(offsets: list[int]) -> None:
    ranges, model = OffsetRuns(offsets), set(offsets)
    assert [offset for offset in range(62) if offset in ranges] == sorted(model)
    assert len(ranges) == len(model)
    assert OffsetRuns.decode(ranges.encode()) == ranges


def test_a_million_redriven_letters_in_a_row_take_no_room() -> None:
    ranges = OffsetRuns(range(1_000_000))
    assert len(ranges.encode()) < 100
    assert len(ranges) == 1_000_000


@pytest.mark.parametrize("value", [b"", b"x", b"eJwDAAAAAAE=", b"eJyLNowFAAHzAO4=", b"eJyLrtYFAAJ5AUk="])
def test_invalid_ranges_are_a_value_error(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"expected a set of offsets"):
        OffsetRuns.decode(value)


@given(value=st.binary(max_size=40))
def test_garbage_is_never_anything_but_ranges_or_a_value_error(value: bytes) -> None:
    with contextlib.suppress(ValueError):
        OffsetRuns.decode(value)
