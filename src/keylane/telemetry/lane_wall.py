"""Lane wall: every lane of a task with its slot and state, packed for one record of telemetry.

A lane takes three bytes before compression, so a record of 20,000 lanes has some tens of kilobytes. Only sent while
somebody looks at single lanes.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import TYPE_CHECKING

from keylane.lanes.lane_table import LaneState
from keylane.strict_json import MalformedRecordError

if TYPE_CHECKING:
    from collections.abc import Iterable

LANES_MAX = 60_000
"""Lanes in one record; more are left out."""
STATES = tuple(LaneState)
"""A state's number in a record is its place here."""
NUMBER_OF = {state: number for number, state in enumerate(STATES)}
LANE_BYTES = 3


def pack(lanes: Iterable[tuple[int, LaneState]]) -> str:
    """The slots and states of lanes as text."""
    content = bytearray()
    for slot, state in lanes:
        content += slot.to_bytes(2, "little")
        content.append(NUMBER_OF[state])
    return base64.b64encode(zlib.compress(bytes(content[: LANES_MAX * LANE_BYTES]), 1)).decode("ascii")


def unpack(text: str) -> bytes:
    """Three bytes for each lane: its slot, little-endian, and the number of its state. Raises MalformedRecordError."""
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(base64.b64decode(text, validate=True), LANES_MAX * LANE_BYTES)
    except (ValueError, binascii.Error, zlib.error) as error:
        raise MalformedRecordError(f"expected packed lanes: {error}") from None
    if (
        unpacker.unconsumed_tail
        or len(content) % LANE_BYTES
        or any(one >= len(STATES) for one in content[2::3])
    ):
        raise MalformedRecordError("expected packed lanes, three bytes each")
    return content
