"""Every decoder of bytes that come from outside: whatever they get, a value or the declared error, and quickly.

``make test`` tries a hundred inputs for each, ``make soak`` thousands.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keylane.dlq import headers, spool_format
from keylane.dlq.record import UnreadableDeadLetter
from keylane.lanes.lane_record import LANE, decode_lane, decode_retries
from keylane.offsets import metadata
from keylane.offsets.offset_runs import OffsetRuns
from keylane.offsets.range_progress import RangeProgress
from keylane.policies.versions import decode_mark, parse_version
from keylane.state import records
from keylane.state.answers import decode_command_answer
from keylane.state.commands import COMMAND, decode_command
from keylane.state.topic import Proposal
from keylane.strict_json import MalformedRecordError
from keylane.telemetry import snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(60)
SOAK = os.environ.get("KEYLANE_HYPOTHESIS") == "explore"
SECONDS_MAX = 2.0
"""For one input of at most a few kilobytes, on a busy machine. What is quadratic or worse takes longer."""


DECODERS: dict[str, Callable[[bytes], object]] = {
    "run": records.decode_run,
    "claim": records.decode_claim,
    "progress": records.decode_progress,
    "load": records.decode_load,
    "plan": records.decode_plan,
    "replan": records.decode_replan,
    "grouped": records.decode_grouped,
    "stop": records.decode_stop,
    "guard stop": records.decode_guard_stop,
    "rest": records.decode_rest,
    "former": records.decode_former,
    "proposal": Proposal.decode,
    "command": lambda value: decode_command(COMMAND + value[:12], 0, value[12:]),
    "command, a good name": lambda value: decode_command(COMMAND + b"0123456789ab", 0, value),
    "answer": decode_command_answer,
    "telemetry": snapshot.decode,
    "redriven": OffsetRuns.decode,
    "range": lambda value: RangeProgress.decode(value[:7].decode("latin-1"), value[7:]),
    "range, good slots": lambda value: RangeProgress.decode("0-31", value),
    "lane": lambda value: decode_lane(LANE + value[:20], 0, value[20:]),
    "lane, a good name": lambda value: decode_lane(LANE + b"k", 0, value),
    "retries": decode_retries,
    "mark": decode_mark,
    "spooled letter": spool_format.decode,
}

JSON_TEXT = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["1e999", 1 << 63, -1, 1e308, "\ud800", "hex:", "0-31", "x" * 3000]),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(
            st.sampled_from(
                [
                    "run",
                    "who",
                    "at",
                    "app",
                    "offset",
                    "stop",
                    "letter",
                    "since",
                    "error",
                    "message",
                    "key",
                    "partition",
                    "done",
                    "epoch",
                    "task",
                    "slots",
                    "leaving",
                    "do",
                    "id",
                    "to",
                    "v",
                    "number",
                    "tasks",
                    "source",
                    "topic",
                    "stage",
                    "ok",
                    "dead",
                    "failures",
                    "owner",
                    "result",
                ]
            )
            | st.text(max_size=6),
            inner,
            max_size=8,
        )
    ),
    max_leaves=25,
).map(lambda value: json.dumps(value).encode())
NASTY = st.sampled_from(
    [
        b"",
        b"[" * 100_000,
        b'{"a":' * 20_000,
        b"1e999",
        b"9" * 5_000,
        b'"' + b"\\" * 50_001 + b'"',
        b"\xff\xfe",
        b"NaN",
        b"kl1:" + b"A" * 4000,
        b"z" + b"\x78\x9c" + b"\x00" * 500,
    ]
)
OUTSIDE = st.binary(max_size=400) | JSON_TEXT | NASTY


def quickly(call: Callable[[], object]) -> None:
    began = time.monotonic()
    with contextlib.suppress(MalformedRecordError):
        call()
    assert time.monotonic() - began < SECONDS_MAX


tries = settings(
    max_examples=5_000 if SOAK else 100, suppress_health_check=[HealthCheck.too_slow], deadline=None
)


@pytest.mark.parametrize("name", DECODERS)
@tries
@given(value=OUTSIDE)
def test_decoder_returns_or_raises_its_error(name: str, value: bytes) -> None:
    quickly(lambda: DECODERS[name](value))


@tries
@given(text=OUTSIDE.map(lambda value: value.decode("latin-1")), watermark=st.integers(0, 1 << 62))
def test_commit_metadata_never_raises(text: str, watermark: int) -> None:
    began = time.monotonic()
    metadata.decode(watermark, text)
    metadata.decode(watermark, f"kl1:{text}")
    assert time.monotonic() - began < SECONDS_MAX


@tries
@given(found=st.one_of(st.integers(), st.floats(), st.text(), st.binary(), st.none(), st.booleans()))
def test_version_of_anything_is_a_number_or_a_value_error(found: object) -> None:
    try:
        version = parse_version(found)
    except (ValueError, TypeError):
        return
    assert 0 <= version < 1 << 63


@dataclass
class Letter:
    """A record of a dead-letter topic."""

    given: list[tuple[str, bytes | None]]
    content: bytes | None

    def __getattr__(self, name: str) -> Any:
        known = {"headers": self.given, "key": self.content, "value": self.content, "topic": "shop.dlq"}
        known |= {"partition": 3, "offset": 7, "timestamp": (1, 1000), "error": None}  # type: ignore[dict-item]
        return lambda *_: known[name]


HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                f"keylane-{each}"
                for each in [
                    "app",
                    "topic",
                    "topic-id",
                    "cluster",
                    "partition",
                    "offset",
                    "kind",
                    "stage",
                    "error",
                    "message",
                    "failures",
                    "redrives",
                    "attempts",
                    "failed-at",
                    "first-at",
                    "timestamp",
                    "event-id",
                    "traceback",
                    "key",
                    "version",
                ]
            ]
        )
        | st.text(max_size=10),
        st.none() | OUTSIDE | st.sampled_from([b"3", b"-1", b"99999999999999999999", b"dead"]),
    ),
    max_size=25,
)


@tries
@given(given=HEADERS, content=st.none() | st.binary(max_size=50))
def test_dead_letter_headers_are_a_letter_or_unreadable(
    given: list[tuple[str, bytes | None]], content: bytes | None
) -> None:
    began = time.monotonic()
    found = headers.parse(Letter(given, content))
    assert time.monotonic() - began < SECONDS_MAX
    if isinstance(found, UnreadableDeadLetter):
        assert found.reason


@tries
@given(content=st.lists(st.binary(max_size=200) | st.just(spool_format.MAGIC), max_size=20).map(b"".join))
def test_spool_file_of_anything_is_read_to_its_end(content: bytes) -> None:
    began = time.monotonic()
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        reader = spool_format.SpoolReader(file.fileno())
        letters = list(reader)
        assert letters == [] or content.count(spool_format.MAGIC) >= len(letters)
    assert time.monotonic() - began < SECONDS_MAX
