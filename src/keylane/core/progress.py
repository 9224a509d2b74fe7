"""Progress as text: what travels in the metadata of a committed offset.

Kafka keeps at most 4,096 bytes of metadata beside an offset, as a string. The watermark itself is the committed
offset; the text holds the reading position and the pending offsets in between, as the smaller of two forms:

* ``d``: the distances between pending offsets, as variable-length integers,
* ``b``: a bitmap from watermark to position, one bit per offset,

each also tried deflated (upper case), then base64. The text begins with a version, ``kl1``; a checksum over it and the
watermark goes before the content. It counts from the watermark, so it must not be read beside another one: tools that
copy groups between clusters translate a committed offset and leave its metadata as it was.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import dataclass
from itertools import pairwise

from keylane.core.watermark import Progress

LIMIT = 4096
"""Kafka's ``offset.metadata.max.bytes`` as it comes."""

_VERSION = "kl1"
_BITMAP_MAX = 1 << 20
"""No bitmap over more offsets than this: deflating megabytes once a second is not worth it."""
_INFLATED_MAX = 1 << 20


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
    text = _encode(progress)
    if limit is None or len(text) <= limit:
        return text
    # The text grows with the number of pending offsets kept: search for the most that fit.
    low, high = 0, len(progress.pending)
    best = ""
    while low < high:
        middle = (low + high + 1) // 2
        text = _encode(_cut(progress, middle))
        if len(text) <= limit:
            low, best = middle, text
        else:
            high = middle - 1
    return best


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


def _cut(progress: Progress, keep: int) -> Progress:
    if keep >= len(progress.pending):
        return progress
    return Progress(
        watermark=progress.watermark, position=progress.pending[keep], pending=progress.pending[:keep]
    )


def _encode(progress: Progress) -> str:
    span = progress.position - progress.watermark
    # A distance takes a byte or more: where the bitmap is smaller than that, the distances cannot win by much.
    forms = {}
    if span > _BITMAP_MAX or 8 * len(progress.pending) <= span:
        forms["d"] = _distances(progress)
    if span <= _BITMAP_MAX:
        forms["b"] = _bitmap(progress)
    for form, raw in list(forms.items()):
        forms[form.upper()] = zlib.compress(raw, 6)
    form, raw = min(forms.items(), key=lambda item: len(item[1]))
    content = _checksum(progress.watermark, form, raw) + raw
    return f"{_VERSION}:{form}{base64.b64encode(content).decode('ascii')}"


def _decode(watermark: int, text: str) -> Progress:
    form, content = text[:1], base64.b64decode(text[1:], validate=True)
    raw = content[4:]
    if content[:4] != _checksum(watermark, form, raw):
        raise ValueError("its checksum does not fit; it belongs to another offset, or was changed")
    if form.isupper():
        inflater = zlib.decompressobj()
        raw = inflater.decompress(raw, _INFLATED_MAX)
        if inflater.unconsumed_tail or not inflater.eof:
            raise ValueError("its deflated part is not whole")
    if form in ("d", "D"):
        numbers = _varints(raw)
        position = watermark + numbers[0]
        pending: list[int] = []
        at = watermark
        for distance in numbers[1:]:
            at += distance
            pending.append(at)
    elif form in ("b", "B"):
        length = int.from_bytes(raw[:4], "little")
        bits = int.from_bytes(raw[4:], "little")
        if length > _BITMAP_MAX or bits.bit_length() > length:
            raise ValueError("its bitmap is too long")
        position = watermark + length
        pending = [watermark + i for i, bit in enumerate(reversed(f"{bits:b}")) if bit == "1"]
    else:
        raise ValueError(f"unknown form {form!r}")
    if any(a >= b for a, b in pairwise(pending)):
        raise ValueError("its offsets do not ascend")
    if pending and (pending[0] != watermark or pending[-1] >= position):
        raise ValueError("its offsets do not fit the committed one")
    if not pending:
        raise ValueError("it holds no pending offset")
    return Progress(watermark=watermark, position=position, pending=tuple(pending))


def _checksum(watermark: int, form: str, raw: bytes) -> bytes:
    return zlib.crc32(raw, zlib.crc32(f"{watermark} {form}".encode())).to_bytes(4, "little")


def _distances(progress: Progress) -> bytes:
    out = bytearray()
    _put(out, progress.position - progress.watermark)
    at = progress.watermark
    for offset in progress.pending:
        _put(out, offset - at)
        at = offset
    return bytes(out)


def _bitmap(progress: Progress) -> bytes:
    length = progress.position - progress.watermark
    bits = bytearray((length + 7) // 8)
    for offset in progress.pending:
        i = offset - progress.watermark
        bits[i >> 3] |= 1 << (i & 7)
    return length.to_bytes(4, "little") + bytes(bits).rstrip(b"\0")


def _put(out: bytearray, number: int) -> None:
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _varints(raw: bytes) -> list[int]:
    numbers: list[int] = []
    value = shift = 0
    for byte in raw:
        value |= (byte & 0x7F) << shift
        if byte & 0x80:
            shift += 7
            if shift > 63:
                raise ValueError("a number is too long")
        else:
            numbers.append(value)
            value = shift = 0
    if shift or not numbers:
        raise ValueError("it ends in the middle of a number")
    return numbers
