"""Run-length set of offsets: for the dead letters that were redriven."""

from __future__ import annotations

import base64
import json
import re
import zlib
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from keylane import strict_json as wire

if TYPE_CHECKING:
    from collections.abc import Iterable

_INFLATED_BYTES_MAX = 8 << 20
"""Bytes of JSON in a record: two million runs. Bounds memory, as a deflated record of 1 MiB can expand to 1 GiB."""
_NUMBERS = re.compile(rb"\[(?:[0-9]{1,19}+(?:,[0-9]{1,19}+)*+)?+\]")


class OffsetRuns:
    """Offsets as ascending, disjoint runs ``[begin, end)``."""

    __slots__ = ("_begins", "_ends")

    def __init__(self, offsets: Iterable[int] = ()) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for offset in offsets:
            self.add(offset)

    def add(self, offset: int) -> None:
        """Add one offset."""
        begins, ends = self._begins, self._ends
        place = bisect_right(begins, offset)  # only the run before it can contain or precede the offset
        if place and offset < ends[place - 1]:
            return
        joins_left = place > 0 and ends[place - 1] == offset
        joins_right = place < len(begins) and begins[place] == offset + 1
        if joins_left and joins_right:
            ends[place - 1] = ends.pop(place)
            del begins[place]
        elif joins_left:
            ends[place - 1] = offset + 1
        elif joins_right:
            begins[place] = offset
        else:
            begins.insert(place, offset)
            ends.insert(place, offset + 1)

    def union(self, other: OffsetRuns) -> OffsetRuns:
        """A new set with the offsets of both."""
        found = OffsetRuns()
        for begin, end in sorted(
            [*zip(self._begins, self._ends, strict=True), *zip(other._begins, other._ends, strict=True)]
        ):
            if found._ends and begin <= found._ends[-1]:
                found._ends[-1] = max(found._ends[-1], end)
            else:
                found._begins.append(begin)
                found._ends.append(end)
        return found

    def __contains__(self, offset: object) -> bool:
        if not isinstance(offset, int):
            return False
        place = bisect_right(self._begins, offset)
        return place > 0 and offset < self._ends[place - 1]

    def __len__(self) -> int:
        return sum(self._ends) - sum(self._begins)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OffsetRuns):
            return NotImplemented
        return self._begins == other._begins and self._ends == other._ends

    __hash__ = None  # type: ignore[assignment]  # it changes

    def encode(self) -> bytes:
        """The set as a value of the state topic, for :meth:`decode`."""
        distances: list[int] = []
        at = 0
        for begin, end in zip(self._begins, self._ends, strict=True):
            distances += (begin - at, end - begin)
            at = end
        return base64.b64encode(zlib.compress(json.dumps(distances, separators=(",", ":")).encode()))

    @classmethod
    @wire.decoder
    def decode(cls, value: bytes) -> OffsetRuns:
        """The reverse of :meth:`encode`. Raises MalformedRecordError."""
        inflater = zlib.decompressobj()
        try:
            inflated = inflater.decompress(base64.b64decode(value, validate=True), _INFLATED_BYTES_MAX)
        except (zlib.error, ValueError) as error:
            raise wire.MalformedRecordError(f"expected a set of offsets: {error}") from error
        if not inflater.eof or inflater.unused_data or not _NUMBERS.fullmatch(inflated):
            raise wire.MalformedRecordError(
                f"expected a set of offsets as a list of numbers of at most {_INFLATED_BYTES_MAX:,} bytes"
            )
        distances = json.loads(inflated)
        if len(distances) % 2 or 0 in distances[1:]:
            raise wire.MalformedRecordError("expected a set of offsets as ascending pairs")
        ends = list(accumulate(distances))
        if ends and ends[-1] > wire.MAX_INT:
            raise wire.MalformedRecordError("expected a set of offsets of at most 64 bits")
        found = cls()
        found._begins, found._ends = ends[::2], ends[1::2]
        return found
