"""Spooled letters as bytes in a file, such that a torn or damaged one is recognised and the others are found.

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

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC = b"KLS\x01"

_HEAD = struct.Struct(">4sII")
_FIXED = struct.Struct(">iqI")  # partition, timestamp, number of headers
_LENGTH = struct.Struct(">i")
_NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Spooled:
    """A dead letter on its way to its topic: ``headers`` hold the message's own and the failure's context."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp: int | None


def frame(entry: Spooled) -> bytes:
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


class Reader:
    """The letters in a file, to be read once; ``torn`` and ``damaged`` are known at its end."""

    def __init__(self, fd: int) -> None:
        self.torn = 0  # bytes at the end that begin a frame
        self.damaged = 0  # places that hold no frame
        self.size = os.fstat(fd).st_size  # what is appended later is not read
        self._fd = fd

    def __iter__(self) -> Iterator[Spooled]:
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
            yield _decode(payload)

    def _frame(self, at: int) -> tuple[bytes, int] | None:
        """The payload of the frame that begins here, and where the next one does."""
        head = os.pread(self._fd, _HEAD.size, at)
        if len(head) < _HEAD.size:
            return None
        magic, length, crc = _HEAD.unpack(head)
        end = at + _HEAD.size + length
        if magic != MAGIC or end > self.size:
            return None
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
                if self._frame(start + place) is not None:
                    return start + place
                place = block.find(MAGIC, place + 1)
        return None

    def _begins(self, at: int) -> bool:
        """Whether the rest of the file is the beginning of a frame."""
        head = os.pread(self._fd, _HEAD.size, at)
        if len(head) < _HEAD.size:
            return head[: len(MAGIC)] == MAGIC[: len(head)]
        return head.startswith(MAGIC) and at + _HEAD.size + int(_HEAD.unpack(head)[1]) > self.size


def _decode(payload: bytes) -> Spooled:
    partition, timestamp, headers = _FIXED.unpack_from(payload)
    at = _FIXED.size

    def take() -> bytes | None:
        nonlocal at
        (length,) = _LENGTH.unpack_from(payload, at)
        at += _LENGTH.size
        if length == _NONE:
            return None
        at += length
        return payload[at - length : at]

    topic, key, value = take(), take(), take()
    return Spooled(
        topic=(topic or b"").decode(),
        partition=partition,
        key=key,
        value=value,
        headers=tuple(((take() or b"").decode(), take()) for _ in range(headers)),
        timestamp=None if timestamp == _NONE else timestamp,
    )


def _crc(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(len(payload).to_bytes(4, "big")))
