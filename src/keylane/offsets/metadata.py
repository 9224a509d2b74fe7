"""Progress codec: a partition's progress as text, for commit metadata, or for the state topic if it is too long.

Kafka stores at most 4,096 bytes of metadata with an offset, as a string. The watermark itself is the committed offset;
the text is ``kl1:`` and the base64 of

* a checksum over the watermark and what follows,
* the distance of the reading position from the watermark,
* the blocks of pending offsets, ascending: the distance of the block's number from the previous one, length and form,
  content.

The content of a block is the gaps between its offsets, as bytes or as pairs of bytes, or its bitmap; each plain or
deflated. An unchanged block keeps its content, so that a million offsets behind a stuck lane are packed only once.

The text is relative to the watermark and must not be combined with another one: tools that copy groups between clusters
translate a committed offset and leave its metadata unchanged. The checksum detects this.

In metadata the text is followed by the identity of the offset's topic (:func:`stamp`): Kafka stores offsets by topic
name, and a task that still runs when its source is deleted and created again commits to the new topic.
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

from keylane.offsets.offset_set import BLOCK_OFFSETS, BLOCK_SHIFT_BITS, OffsetBlock, OffsetSet
from keylane.offsets.watermark import PartitionProgress

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from keylane.offsets.identity import TopicIdentity

METADATA_BYTES_MAX = 4096
"""The default of Kafka's ``offset.metadata.max.bytes``."""

_VERSION = "kl1"
_CHECKSUM_BYTES = 4

_BYTES, _PAIRS, _BITMAP = 0, 2, 4
_DEFLATED = 1
_FORM_BITS = 3

_STRATEGIES = (zlib.Z_HUFFMAN_ONLY, zlib.Z_DEFAULT_STRATEGY)
_GAP_OFFSETS_MAX = 2048
"""Offsets of a block that are written as gaps; above this a deflated bitmap is as small and faster."""
BLOCK_BYTES_MAX = 64 << 20
"""Memory for blocks decoded from a text; a text that needs more is never written."""
_OFFSET_END = 1 << 63
_SMALL = [bytes([number]) for number in range(0x80)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The result of :func:`decode`."""

    progress: PartitionProgress
    problem: str | None = None
    """Why the metadata could not be used, as text for users. Then only the watermark counts, and more runs again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A committed offset and its metadata."""

    offset: int
    text: str | None
    """The metadata that the app wrote; None if the offset was not committed by the app: the group was moved."""
    problem: str | None = None
    """Why there is no text, unless the group was moved on purpose."""


def stamp(text: str, source: TopicIdentity) -> str:
    """The metadata for an offset of this topic: the text and the topic's identity."""
    return f"{text} {source.cluster}/{source.id}"


def judge(offset: int, metadata: str | None, source: TopicIdentity) -> Committed | None:
    """Check a committed offset's metadata; None if the offset belongs to an earlier topic of this name."""
    if not metadata:
        return Committed(offset=offset, text=None)
    text, _, about = metadata.partition(" ")
    if about == f"{source.cluster}/{source.id}":
        return Committed(offset=offset, text=text)
    if not about:
        problem = decode(offset, text).problem or f"the offset's metadata names no topic: {metadata[:40]!r}"
        return Committed(offset=offset, text=None, problem=problem)
    if about.startswith(f"{source.cluster}/"):
        return None
    return Committed(
        offset=offset,
        text=None,
        problem=f"the offset was copied here: its metadata belongs to topic {about!r}",
    )


def encode(progress: PartitionProgress, limit: int | None = None) -> str:
    """The text for this progress, at most ``limit`` characters.

    If not everything fits, the highest part is left out: those offsets run again after a restart; nothing is skipped.
    """
    if progress.position == progress.watermark:
        return ""
    position = progress.position
    room = None if limit is None else (limit - len(_VERSION) - 1) // 4 * 3
    size = _CHECKSUM_BYTES + len(_varint(position - progress.watermark))
    weight = 0
    before = progress.watermark >> BLOCK_SHIFT_BITS
    parts: list[bytes] = []
    for block in progress.pending.blocks:
        part = _varint(block.number - before) + (block.packed or _packed(block))
        weight += block.weight
        if weight > BLOCK_BYTES_MAX:
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
    """Progress from a committed offset and its metadata. Never raises: invalid metadata gives a ``problem``."""
    plain = PartitionProgress(watermark=watermark, position=watermark)
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


def _decode(watermark: int, text: str) -> PartitionProgress:
    everything = base64.b64decode(text, validate=True)
    content = everything[_CHECKSUM_BYTES:]
    if everything[:_CHECKSUM_BYTES] != _checksum(watermark, content):
        raise ValueError("wrong checksum: it belongs to another offset, or was changed")
    distance, at = _read_varint(content, 0)
    position = watermark + distance
    number = watermark >> BLOCK_SHIFT_BITS
    blocks: list[OffsetBlock] = []
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
        if weight > BLOCK_BYTES_MAX:
            raise ValueError("it has more pending offsets than are ever written")
    if not blocks:
        raise ValueError("it has no pending offset")
    if blocks[0].first != watermark or blocks[-1].last >= position or position > _OFFSET_END:
        raise ValueError("its offsets do not fit the committed one")
    return PartitionProgress(watermark=watermark, position=position, pending=OffsetSet(blocks))


def _checksum(watermark: int, content: bytes) -> bytes:
    return zlib.crc32(content, zlib.crc32(f"{watermark} ".encode())).to_bytes(_CHECKSUM_BYTES, "little")


def _cut(block: OffsetBlock, before: int, room: int) -> tuple[bytes, int]:
    """As much of the lower part of the block as fits, and the resulting position."""
    lows = block.lows()
    best, kept = b"", 0
    high = len(lows)
    # An approximate search: eight steps get within 1 % of the block, and each step packs it again.
    for _ in range(8):
        middle = (kept + high) // 2
        if middle == kept:
            break
        part = _varint(block.number - before) + _packed(OffsetBlock.of(block.number, lows[:middle]))
        if len(part) <= room:
            best, kept = part, middle
        else:
            high = middle
    return best, block.number << BLOCK_SHIFT_BITS | lows[kept]


def _packed(block: OffsetBlock) -> bytes:
    """Length, form and content of the block, which caches them."""
    bits = block.bits
    if bits is None or block.count <= _GAP_OFFSETS_MAX:
        form, raw = _gaps(block.lows())
        deflated = _deflate(raw, zlib.Z_DEFAULT_STRATEGY)
    else:
        form, raw = _BITMAP, bits
        # For scattered offsets a search for repetitions is slower and the result longer.
        sample = bits[:256] + bits[2500:2756] + bits[5000:5256] + bits[7500:7756]
        deflated = _deflate(raw, min(_STRATEGIES, key=lambda strategy: len(_deflate(sample, strategy))))
    if len(deflated) < len(raw):
        form, raw = form | _DEFLATED, deflated
    block.packed = _varint(len(raw) << _FORM_BITS | form) + raw
    return block.packed


def _unpacked(number: int, form: int, raw: bytes) -> OffsetBlock:
    if form & _DEFLATED:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        raw = inflater.decompress(raw, BLOCK_OFFSETS // 8)
        if not inflater.eof or inflater.unconsumed_tail or inflater.unused_data:
            raise ValueError("a deflated block is not whole")
        form ^= _DEFLATED
    if form == _BITMAP:
        if len(raw) != BLOCK_OFFSETS // 8 or not any(raw):
            raise ValueError("a bitmap has the wrong size, or is empty")
        return OffsetBlock.of_bits(number, raw)
    if form not in (_BYTES, _PAIRS):
        raise ValueError(f"a block has an unknown form, {form}")
    half = len(raw) // 2
    gaps: Iterable[int] = raw
    if form == _PAIRS:
        gaps = map(add, raw[:half], (high << 8 for high in raw[half:]))
    lows = list(map(add, accumulate(gaps), count()))
    if (
        not 0 < len(lows) <= _GAP_OFFSETS_MAX
        or lows[-1] >= BLOCK_OFFSETS
        or (form == _PAIRS and len(raw) % 2)
    ):
        raise ValueError("the gaps of a block are too many, too few or too large")
    return OffsetBlock.of(number, lows)


def _gaps(lows: Sequence[int]) -> tuple[int, bytes]:
    """The gap before each offset: in one byte each, or in two, all lower bytes first."""
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
    """The number at this position, and the position after it."""
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
