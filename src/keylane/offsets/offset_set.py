"""Compressed set of pending offsets: blocks that use one bit or two bytes per offset."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import accumulate, count
from operator import add, attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

BLOCK_SHIFT_BITS = 16
BLOCK_OFFSETS = 1 << BLOCK_SHIFT_BITS
"""Offsets per block: block *n* covers the offsets from ``n * BLOCK_OFFSETS``."""
_LOW_BITS_MASK = BLOCK_OFFSETS - 1
_LIST_OFFSETS_MAX = 512
"""Up to this many offsets a block is a list, two bytes each; above it is a bitmap of 8 KiB."""
_number = attrgetter("number")


class OffsetBlock:
    """The pending offsets of one span of ``BLOCK_OFFSETS`` offsets, at least one. Immutable.

    ``packed`` caches its encoded form for :mod:`keylane.offsets.metadata`.
    """

    __slots__ = ("_lows", "count", "number", "packed", "weight")

    def __init__(self, number: int, count: int, lows: array[int] | bytes) -> None:
        """Use :meth:`of` or :meth:`of_bits`, which give equal offsets the same representation."""
        self.number = number
        self.count = count
        self._lows = lows
        self.weight = 256 + (2 * count if count <= _LIST_OFFSETS_MAX else BLOCK_OFFSETS // 8)
        """Approximate memory in bytes."""
        self.packed: bytes | None = None

    @staticmethod
    def of(number: int, offsets: Sequence[int]) -> OffsetBlock:
        """From ascending offsets, or their low bits, all of this block."""
        if len(offsets) <= _LIST_OFFSETS_MAX:
            return OffsetBlock(
                number, len(offsets), array("H", [offset & _LOW_BITS_MASK for offset in offsets])
            )
        bits = bytearray(BLOCK_OFFSETS // 8)
        for offset in offsets:
            bits[(offset & _LOW_BITS_MASK) >> 3] |= 1 << (offset & 7)
        return OffsetBlock(number, len(offsets), bytes(bits))

    @staticmethod
    def of_bits(number: int, bits: bytes) -> OffsetBlock:
        """From a bitmap with one bit per offset of the span."""
        block = OffsetBlock(number, int.from_bytes(bits, "little").bit_count(), bits)
        return block if block.count > _LIST_OFFSETS_MAX else OffsetBlock.of(number, block.lows())

    @property
    def first(self) -> int:
        """The lowest offset."""
        lows = self._lows
        if isinstance(lows, array):
            return self.number << BLOCK_SHIFT_BITS | lows[0]
        byte = len(lows) - len(lows.lstrip(b"\0"))
        return self.number << BLOCK_SHIFT_BITS | byte << 3 | (lows[byte] & -lows[byte]).bit_length() - 1

    @property
    def last(self) -> int:
        """The highest offset."""
        lows = self._lows
        if isinstance(lows, array):
            return self.number << BLOCK_SHIFT_BITS | lows[-1]
        byte = len(lows.rstrip(b"\0")) - 1
        return self.number << BLOCK_SHIFT_BITS | byte << 3 | lows[byte].bit_length() - 1

    @property
    def bits(self) -> bytes | None:
        """The bitmap; None if the block is a list."""
        return None if isinstance(self._lows, array) else self._lows

    def lows(self) -> Sequence[int]:
        """The low bits of its offsets, ascending."""
        if isinstance(self._lows, array):
            return self._lows
        # The lengths of the runs of 0 before each 1, without a Python loop over the bits.
        runs = f"{int.from_bytes(self._lows, 'little'):b}"[::-1].split("1")
        runs.pop()
        return list(map(add, accumulate(map(len, runs)), count()))

    def holds(self, low: int) -> bool:
        """Whether the offset with these low bits is pending."""
        lows = self._lows
        if isinstance(lows, array):
            place = bisect_left(lows, low)
            return place < len(lows) and lows[place] == low
        return bool(lows[low >> 3] >> (low & 7) & 1)

    def plus(self, offsets: Sequence[int]) -> OffsetBlock:
        """A block with these offsets added: ascending, and none of them in the block."""
        if isinstance(self._lows, array):
            return OffsetBlock.of(
                self.number, sorted({*self._lows, *(offset & _LOW_BITS_MASK for offset in offsets)})
            )
        bits = bytearray(self._lows)
        for offset in offsets:
            bits[(offset & _LOW_BITS_MASK) >> 3] |= 1 << (offset & 7)
        return OffsetBlock(self.number, self.count + len(offsets), bytes(bits))

    def without(self, offsets: Iterable[int]) -> OffsetBlock | None:
        """A block with these offsets removed, as far as present; None if nothing is left."""
        if isinstance(self._lows, array):
            gone = {offset & _LOW_BITS_MASK for offset in offsets}
            left = [low for low in self._lows if low not in gone]
            return OffsetBlock.of(self.number, left) if left else None
        bits = bytearray(self._lows)
        kept = self.count
        for offset in offsets:
            byte, bit = (offset & _LOW_BITS_MASK) >> 3, 1 << (offset & 7)
            if bits[byte] & bit:
                bits[byte] ^= bit
                kept -= 1
        if kept > _LIST_OFFSETS_MAX:
            return OffsetBlock(self.number, kept, bytes(bits))
        return OffsetBlock.of_bits(self.number, bytes(bits)) if kept else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OffsetBlock):
            return NotImplemented
        return self.number == other.number and self.count == other.count and self._lows == other._lows

    def __hash__(self) -> int:
        return hash((self.number, self.count))


class OffsetSet:
    """An immutable, ascending, compressed set of offsets. Sets with the same offsets are equal."""

    __slots__ = ("_index", "_len", "blocks")

    def __init__(self, blocks: Iterable[OffsetBlock] = ()) -> None:
        """From blocks with ascending numbers; :meth:`of` takes offsets."""
        self.blocks = tuple(blocks)
        self._len = sum(block.count for block in self.blocks)
        self._index: dict[int, OffsetBlock] | None = None

    @staticmethod
    def of(offsets: Iterable[int]) -> OffsetSet:
        """From offsets in any order."""
        return OffsetSet(blocks_of(sorted(set(offsets))))

    def since(self, offset: int) -> list[OffsetBlock]:
        """The blocks of all offsets that are not below this one."""
        place = bisect_left(self.blocks, offset >> BLOCK_SHIFT_BITS, key=_number)
        blocks = list(self.blocks[place:])
        if blocks and blocks[0].first < offset:
            lows = blocks[0].lows()
            left = lows[bisect_left(lows, offset & _LOW_BITS_MASK) :]
            blocks[:1] = [OffsetBlock.of(blocks[0].number, left)] if left else []
        return blocks

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        for block in self.blocks:
            base = block.number << BLOCK_SHIFT_BITS
            for low in block.lows():
                yield base + low

    def __contains__(self, offset: int) -> bool:
        index = self._index
        if index is None:
            index = self._index = {block.number: block for block in self.blocks}
        block = index.get(offset >> BLOCK_SHIFT_BITS)
        return block is not None and block.holds(offset & _LOW_BITS_MASK)

    def __eq__(self, other: object) -> bool:
        return self.blocks == other.blocks if isinstance(other, OffsetSet) else NotImplemented

    def __hash__(self) -> int:
        return hash((self._len, self.blocks[:1]))

    def __repr__(self) -> str:
        if len(self) <= 10:
            return f"OffsetSet.of({list(self)})"
        return f"<{len(self)} pending from {self.blocks[0].first} to {self.blocks[-1].last}>"


def blocks_of(offsets: list[int]) -> list[OffsetBlock]:
    """The blocks of ascending offsets."""
    blocks = []
    at = 0
    while at < len(offsets):
        number = offsets[at] >> BLOCK_SHIFT_BITS
        end = bisect_left(offsets, number + 1 << BLOCK_SHIFT_BITS, at)
        blocks.append(OffsetBlock.of(number, offsets[at:end]))
        at = end
    return blocks


def joined(low: list[OffsetBlock], high: list[OffsetBlock]) -> list[OffsetBlock]:
    """Both lists as one; every offset in ``high`` is above those in ``low``, but the two may share a block."""
    if low and high and low[-1].number == high[0].number:
        return [*low[:-1], low[-1].plus(high[0].lows()), *high[1:]]
    return low + high
