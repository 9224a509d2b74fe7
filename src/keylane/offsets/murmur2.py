"""The partitioner of Java clients: murmur2 of the key. All producers of a topic must use the same one."""

from __future__ import annotations

_MASK = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """The hash with which Java clients choose a partition, as a signed 32-bit number."""
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
    """The partition that a client with Java's partitioner chooses for this key."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
