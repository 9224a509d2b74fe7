from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.state.pauses import PAUSE, PauseRecord, decode_pause, scopes_of
from keylane.state.topic import kind_of
from keylane.strict_json import MalformedRecordError


def record(**more: Any) -> PauseRecord:
    return PauseRecord(**{"kind": "app", "who": "me", "at": 1.5, "reason": "why", **more})


@given(st.text(min_size=1, max_size=20), st.binary(max_size=30), st.integers(0, 1000))
def test_pause_survives_encoding(stage: str, key: bytes, partition: int) -> None:
    for one in (
        record(),
        record(kind="partition", partition=partition),
        record(kind="stage", stage=stage),
        record(kind="key", key=key),
    ):
        assert decode_pause(one.name, partition, one.encode()) == one
        assert kind_of(one.name) == "pause"


def test_scopes_are_those_of_the_engine() -> None:
    records = [
        record(),
        record(kind="partition", partition=3),
        record(kind="stage", stage="pay"),
        record(kind="key", key=b"k"),
        record(kind="key", key=b"k", who="other"),
    ]
    assert list(scopes_of(records)) == [("app", None), ("partition", 3), ("stage", "pay"), ("key", b"k")]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (PAUSE + b"all", b'{"who": "", "at": 1, "reason": ""}'),
        (PAUSE + b"stage/\xff", b'{"who": "", "at": 1, "reason": ""}'),
        (PAUSE + b"app", b"{}"),
        (PAUSE + b"app", b"[]"),
        (PAUSE + b"app", b'{"who": 1, "at": 1, "reason": ""}'),
        (PAUSE + b"app", b'{"who": "", "at": "x", "reason": ""}'),
        (PAUSE + b"app", b'{"who": "", "at": 1, "reason": "%s"}' % (b"x" * 1001)),
    ],
)
def test_malformed_pause_is_refused(name: bytes, value: bytes) -> None:
    with pytest.raises(MalformedRecordError):
        decode_pause(name, 0, value)
