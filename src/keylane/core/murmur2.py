"""Where a key lives: the partitioner of Java's clients, which all who write must share."""

from __future__ import annotations

_MASK = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """The hash by which Java clients choose a partition, as the signed 32-bit number that Java sees."""
    m = 0x5BD1E995
    h = (0x9747B28C ^ len(data)) & _MASK
    whole = len(data) & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * m & _MASK
        k = (k ^ k >> 24) * m & _MASK
        h = h * m & _MASK ^ k
    if whole < len(data):
        h = (h ^ int.from_bytes(data[whole:], "little")) * m & _MASK
    h = (h ^ h >> 13) * m & _MASK
    h ^= h >> 15
    return h - (1 << 32) if h >> 31 else h


def partition_of(key: bytes, partitions: int) -> int:
    """The partition that every client whose partitioner is Java's puts this key into."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
