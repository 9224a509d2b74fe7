"""SpooledDeadLetter letters as bytes in a file, such that a torn or damaged one is recognised and the others are found.

A letter is a frame::

    "KLS" version:u8 | length:u32 | crc32:u32 of length and payload | payload

The end of a file may hold the beginning of a frame, when its process died while writing: that letter was not promised.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane import strict_json as wire

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC = b"KLS\x01"

_HEAD = struct.Struct(">4sII")
_FIXED = struct.Struct(">iqI")  # partition, timestamp, number of headers
_LENGTH = struct.Struct(">i")
_NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpooledDeadLetter:
    """A dead letter on its way to its topic: ``headers`` hold the message's own and the failure's context."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp: int | None


def frame(entry: SpooledDeadLetter) -> bytes:
    """The letter as it is written."""
    parts = [
        _FIXED.pack(
            entry.partition, _NONE if entry.timestamp is None else entry.timestamp, len(entry.headers)
        )
    ]
    texts = [entry.topic.encode(), entry.key, entry.value]
    for name, content in entry.headers:
        texts += [name.encode(), content]
    for text in texts:
        parts.append(_LENGTH.pack(_NONE if text is None else len(text)))
        parts.append(text or b"")
    payload = b"".join(parts)
    return _HEAD.pack(MAGIC, len(payload), _crc(payload)) + payload


_SEARCH_FILE_SIZES_MAX = 8
"""How often the size of the file may be read while frames are looked for behind a place that holds none."""


class SpoolReader:
    """The letters in a file, to be read once; ``torn`` and ``damaged`` are known at its end.

    With ``topic``, letters for any other are damage: a program that can write into the folder must not choose where the
    writes.
    """

    def __init__(self, fd: int, topic: str | None = None) -> None:
        self.torn = 0  # bytes at the end that begin a frame
        self.damaged = 0  # places that hold no frame
        self.size = os.fstat(fd).st_size  # what is appended later is not read
        self._fd = fd
        self._topic = topic
        self._search = _SEARCH_FILE_SIZES_MAX * self.size + (
            1 << 20
        )  # bytes that may still be read to find a frame

    def __iter__(self) -> Iterator[SpooledDeadLetter]:
        at = 0
        while at < self.size:
            found = self._frame(at)
            if found is None:
                following = self._after(at)
                if following is None and self._begins(at):
                    self.torn = self.size - at
                else:
                    self.damaged += 1
                if following is None:
                    return
                at = following
                continue
            payload, at = found
            try:
                letter = decode(payload)
            except wire.MalformedRecordError:
                self.damaged += 1
                continue
            if self._topic is None or letter.topic == self._topic:
                yield letter
            else:
                self.damaged += 1

    def _frame(self, at: int, *, searching: bool = False) -> tuple[bytes, int] | None:
        """The payload of the frame that begins here, and where the next one does."""
        head = os.pread(self._fd, _HEAD.size, at)
        if len(head) < _HEAD.size:
            return None
        magic, length, crc = _HEAD.unpack(head)
        end = at + _HEAD.size + length
        if magic != MAGIC or end > self.size:
            return None
        if searching:
            self._search -= length
        payload = os.pread(self._fd, length, at + _HEAD.size)
        return (payload, end) if _crc(payload) == crc else None

    def _after(self, at: int) -> int | None:
        """Where the next whole frame begins behind a place that holds none."""
        head = os.pread(self._fd, _HEAD.size, at)
        if len(head) == _HEAD.size and head.startswith(MAGIC):  # its length may be right
            end = at + _HEAD.size + int(_HEAD.unpack(head)[1])
            if self._frame(end) is not None:
                return end
        step = 1 << 16
        for start in range(at + 1, self.size, step):
            block = os.pread(self._fd, step + len(MAGIC) - 1, start)
            place = block.find(MAGIC)
            while place >= 0:
                if self._search < 0:  # bytes that only look like frames: the file is put aside as it is
                    return None
                if self._frame(start + place, searching=True) is not None:
                    return start + place
                place = block.find(MAGIC, place + 1)
        return None

    def _begins(self, at: int) -> bool:
        """Whether the rest of the file is the beginning of a frame."""
        head = os.pread(self._fd, _HEAD.size, at)
        if len(head) < _HEAD.size:
            return head[: len(MAGIC)] == MAGIC[: len(head)]
        return head.startswith(MAGIC) and at + _HEAD.size + int(_HEAD.unpack(head)[1]) > self.size


@wire.decoder
def decode(payload: bytes) -> SpooledDeadLetter:
    """The letter of a frame. Raises MalformedRecordError: a right checksum says nothing about who wrote it."""
    if len(payload) < _FIXED.size:
        raise wire.MalformedRecordError(f"expected a dead letter, got {len(payload)} bytes")
    partition, timestamp, headers = _FIXED.unpack_from(payload)
    at = _FIXED.size

    def take() -> bytes | None:
        nonlocal at
        begin = at + _LENGTH.size
        length = int(_LENGTH.unpack_from(payload, at)[0]) if begin <= len(payload) else _NONE - 1
        if not _NONE <= length <= len(payload) - begin:
            raise wire.MalformedRecordError(f"expected a length within the dead letter, got {length}")
        at = begin + max(0, length)
        return None if length == _NONE else payload[begin:at]

    topic, key, value = take(), take(), take()
    if partition < 0 or timestamp < _NONE or headers > len(payload) // (2 * _LENGTH.size):
        raise wire.MalformedRecordError(
            f"expected a place and headers, got {partition}, {timestamp}, {headers}"
        )
    letter = SpooledDeadLetter(
        topic=(topic or b"").decode(),
        partition=partition,
        key=key,
        value=value,
        headers=tuple(((take() or b"").decode(), take()) for _ in range(headers)),
        timestamp=None if timestamp == _NONE else timestamp,
    )
    if at != len(payload):
        raise wire.MalformedRecordError(f"expected {at} bytes, got {len(payload)}")
    return letter


def _crc(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(len(payload).to_bytes(4, "big")))
