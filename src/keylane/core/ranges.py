"""A set of offsets that is mostly made of runs: letters that were redriven."""

from __future__ import annotations

import base64
import json
import zlib
from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Ranges:
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
        place = bisect_right(begins, offset)  # the run before it is the only one that can hold or precede it
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

    def union(self, other: Ranges) -> Ranges:
        """The offsets of both, as another set."""
        found = Ranges()
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
        if not isinstance(other, Ranges):
            return NotImplemented
        return self._begins == other._begins and self._ends == other._ends

    __hash__ = None  # type: ignore[assignment]  # it changes

    def first_missing(self, start: int) -> int:
        """The first offset from ``start`` on that is not in the set."""
        place = bisect_right(self._begins, start)
        return self._ends[place - 1] if place and start < self._ends[place - 1] else start

    def forget_below(self, offset: int) -> None:
        """Drop the runs that end at or before ``offset``: the log begins there now."""
        while self._ends and self._ends[0] <= offset:
            del self._begins[0], self._ends[0]

    def encode(self) -> bytes:
        """For :meth:`decode`."""
        distances: list[int] = []
        at = 0
        for begin, end in zip(self._begins, self._ends, strict=True):
            distances += (begin - at, end - begin)
            at = end
        return base64.b64encode(zlib.compress(json.dumps(distances, separators=(",", ":")).encode()))

    @classmethod
    def decode(cls, value: bytes) -> Ranges:
        """Raises ValueError for what is no set."""
        try:
            distances = json.loads(zlib.decompress(base64.b64decode(value, validate=True)))
        except (zlib.error, ValueError) as error:
            raise ValueError(f"no set of offsets: {error}") from error
        found = cls()
        at = 0
        if not isinstance(distances, list) or len(distances) % 2:
            raise ValueError("no set of offsets: it does not come in pairs")
        for skip, length in zip(distances[::2], distances[1::2], strict=True):
            if type(skip) is not int or type(length) is not int or length < 1 or skip < (1 if at else 0):
                raise ValueError("no set of offsets: its runs do not ascend")
            found._begins.append(at + skip)
            at += skip + length
            found._ends.append(at)
        return found
