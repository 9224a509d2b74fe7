"""Progress as text: what travels in the metadata of a committed offset, or in the state topic when that is too small.

Kafka keeps at most 4,096 bytes of metadata beside an offset, as a string. The watermark itself is the committed
offset; the text is ``kl1:`` and the base64 of

* a checksum over the watermark and what follows,
* how far the reading position is from the watermark,
* the blocks of pending offsets, ascending: the distance of its number from the one before, length and form, content.

The content of a block is what its offsets leave out between each other, as bytes or as pairs of bytes, or its bitmap;
each as it is or deflated. A block that has not changed keeps its content, so that a million offsets behind a stuck lane
are packed once and not once a second.

The text counts from the watermark, so it must not be read beside another one: tools that copy groups between clusters
translate a committed offset and leave its metadata as it was.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from array import array
from dataclasses import dataclass
from itertools import accumulate, count
from operator import add, sub
from typing import TYPE_CHECKING

from keylane.core.pending import SHIFT, SPAN, Block, Pending
from keylane.core.watermark import Progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LIMIT = 4096
"""Kafka's ``offset.metadata.max.bytes`` as it comes."""

_VERSION = "kl1"
_CHECKSUM = 4

_BYTES, _PAIRS, _BITMAP = 0, 2, 4
_DEFLATED = 1
_FORM_BITS = 3

_STRATEGIES = (zlib.Z_HUFFMAN_ONLY, zlib.Z_DEFAULT_STRATEGY)
_GAPS_MAX = 2048
"""Offsets of a block that are written as gaps; of more a deflated bitmap is as small, and four times as quick."""
_HELD_MAX = 64 << 20
"""Bytes of memory that blocks may take which were read from a text, whatever it says; more is never written."""
_OFFSET_END = 1 << 63
_SMALL = [bytes([number]) for number in range(0x80)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What :func:`decode` made of a committed offset and its metadata."""

    progress: Progress
    problem: str | None = None
    """Why the metadata could not be used, in words; then only the watermark counts and more runs again."""


def encode(progress: Progress, limit: int | None = None) -> str:
    """The text for this progress, at most ``limit`` characters.

    When not everything fits, the highest part is left out: those offsets run again after a restart, nothing is skipped.
    """
    if progress.position == progress.watermark:
        return ""
    position = progress.position
    room = None if limit is None else (limit - len(_VERSION) - 1) // 4 * 3
    size = _CHECKSUM + len(_varint(position - progress.watermark))
    weight = 0
    before = progress.watermark >> SHIFT
    parts: list[bytes] = []
    for block in progress.pending.blocks:
        part = _varint(block.number - before) + (block.packed or _packed(block))
        weight += block.weight
        if weight > _HELD_MAX:
            position = block.first
            break
        if room is not None and size + len(part) > room:
            part, position = _cut(block, before, room - size)
            parts.append(part)
            break
        parts.append(part)
        size += len(part)
        before = block.number
    if not any(parts):
        return ""
    content = _varint(position - progress.watermark) + b"".join(parts)
    text = base64.b64encode(_checksum(progress.watermark, content) + content).decode("ascii")
    return f"{_VERSION}:{text}"


def decode(watermark: int, metadata: str | None) -> Restored:
    """Progress from a committed offset and its metadata. Never raises: metadata without sense is a ``problem``."""
    plain = Progress(watermark=watermark, position=watermark)
    if not metadata:
        return Restored(progress=plain)
    version, _, rest = metadata.partition(":")
    if version != _VERSION:
        kind = "a newer version" if version.startswith("kl") and version[2:].isdigit() else "another program"
        return Restored(
            progress=plain, problem=f"the offset's metadata was written by {kind}: {metadata[:40]!r}"
        )
    try:
        progress = _decode(watermark, rest)
    except (ValueError, IndexError, binascii.Error, zlib.error) as error:
        return Restored(
            progress=plain, problem=f"the offset's metadata is damaged ({error}): {metadata[:40]!r}"
        )
    return Restored(progress=progress)


def _decode(watermark: int, text: str) -> Progress:
    everything = base64.b64decode(text, validate=True)
    content = everything[_CHECKSUM:]
    if everything[:_CHECKSUM] != _checksum(watermark, content):
        raise ValueError("its checksum does not fit; it belongs to another offset, or was changed")
    distance, at = _read_varint(content, 0)
    position = watermark + distance
    number = watermark >> SHIFT
    blocks: list[Block] = []
    weight = 0
    while at < len(content):
        step, at = _read_varint(content, at)
        start = at
        head, at = _read_varint(content, at)
        length, form = head >> _FORM_BITS, head & (1 << _FORM_BITS) - 1
        if at + length > len(content):
            raise ValueError("it ends in the middle of a block")
        if blocks and not step:
            raise ValueError("its blocks do not ascend")
        number += step
        block = _unpacked(number, form, content[at : at + length])
        at += length
        block.packed = content[start:at]
        blocks.append(block)
        weight += block.weight
        if weight > _HELD_MAX:
            raise ValueError("it holds more pending offsets than are ever written")
    if not blocks:
        raise ValueError("it holds no pending offset")
    if blocks[0].first != watermark or blocks[-1].last >= position or position > _OFFSET_END:
        raise ValueError("its offsets do not fit the committed one")
    return Progress(watermark=watermark, position=position, pending=Pending(blocks))


def _checksum(watermark: int, content: bytes) -> bytes:
    return zlib.crc32(content, zlib.crc32(f"{watermark} ".encode())).to_bytes(_CHECKSUM, "little")


def _cut(block: Block, before: int, room: int) -> tuple[bytes, int]:
    """The lower part of the block, as much as fits, and where the position is then."""
    lows = block.lows()
    best, kept = b"", 0
    high = len(lows)
    # Not to the last offset: eight steps leave less than a hundredth of the block, and each packs it again.
    for _ in range(8):
        middle = (kept + high) // 2
        if middle == kept:
            break
        part = _varint(block.number - before) + _packed(Block.of(block.number, lows[:middle]))
        if len(part) <= room:
            best, kept = part, middle
        else:
            high = middle
    return best, block.number << SHIFT | lows[kept]


def _packed(block: Block) -> bytes:
    """Length, form and content of the block, which keeps them."""
    bits = block.bits
    if bits is None or block.count <= _GAPS_MAX:
        form, raw = _gaps(block.lows())
        deflated = _deflate(raw, zlib.Z_DEFAULT_STRATEGY)
    else:
        form, raw = _BITMAP, bits
        # Where offsets are scattered, looking for what repeats takes five times as long and makes it longer.
        sample = bits[:256] + bits[2500:2756] + bits[5000:5256] + bits[7500:7756]
        deflated = _deflate(raw, min(_STRATEGIES, key=lambda strategy: len(_deflate(sample, strategy))))
    if len(deflated) < len(raw):
        form, raw = form | _DEFLATED, deflated
    block.packed = _varint(len(raw) << _FORM_BITS | form) + raw
    return block.packed


def _unpacked(number: int, form: int, raw: bytes) -> Block:
    if form & _DEFLATED:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        raw = inflater.decompress(raw, SPAN // 8)
        if not inflater.eof or inflater.unconsumed_tail or inflater.unused_data:
            raise ValueError("a deflated block is not whole")
        form ^= _DEFLATED
    if form == _BITMAP:
        if len(raw) != SPAN // 8 or not any(raw):
            raise ValueError("a bitmap has the wrong size, or is empty")
        return Block.of_bits(number, raw)
    if form not in (_BYTES, _PAIRS):
        raise ValueError(f"a block has an unknown form, {form}")
    half = len(raw) // 2
    gaps: Iterable[int] = raw
    if form == _PAIRS:
        gaps = map(add, raw[:half], (high << 8 for high in raw[half:]))
    lows = list(map(add, accumulate(gaps), count()))
    if not 0 < len(lows) <= _GAPS_MAX or lows[-1] >= SPAN or (form == _PAIRS and len(raw) % 2):
        raise ValueError("the gaps of a block are too many, too few or too large")
    return Block.of(number, lows)


def _gaps(lows: Sequence[int]) -> tuple[int, bytes]:
    """How many offsets are left out before each one: in a byte each or, the lower bytes first, in two."""
    gaps = array("H", map(sub, lows, [0, *map((1).__add__, lows)]))
    if max(gaps) < 256:
        return _BYTES, bytes(gaps.tolist())
    return _PAIRS, bytes(gap & 0xFF for gap in gaps) + bytes(gap >> 8 for gap in gaps)


def _deflate(raw: bytes, strategy: int) -> bytes:
    deflater = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS, 9, strategy)
    return deflater.compress(raw) + deflater.flush()


def _varint(number: int) -> bytes:
    if number <= 0x7F:
        return _SMALL[number]
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number that begins there, and where it ends."""
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")
