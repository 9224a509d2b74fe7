"""A few of Kafka's requests, byte by byte: for what no client library does, as a late request."""

from __future__ import annotations

import socket
import struct
import time
from typing import Self

PRODUCE, INIT_PRODUCER_ID, END_TXN = 0, 22, 26
_TRANSACTIONAL = 0x10


def hanging_record(bootstrap: str, transactional_id: str, places: dict[str, int]) -> None:
    """Leave a record of this id's transaction in a partition of each topic, without telling the coordinator.

    The holder of the id is fenced. The broker must not verify partitions (transaction.partition.verification.enable).
    """
    with RawConnection(bootstrap) as connection:
        producer, epoch = connection.init_producer_id(transactional_id)
        for topic, partition in places.items():
            connection.produce(transactional_id, producer, epoch, topic, partition)


class RawConnection:
    """One connection to a broker. Requests and answers take turns."""

    def __init__(self, bootstrap: str) -> None:
        host, _, port = bootstrap.partition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=10)
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, api: int, version: int, body: bytes) -> bytes:
        """Send a request with the old header, and return its answer without the header."""
        self._number += 1
        request = struct.pack(">hhi", api, version, self._number) + _text("raw") + body
        self._socket.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", self._read(4))
        return self._read(size)[4:]

    def init_producer_id(self, transactional_id: str) -> tuple[int, int]:
        """The producer id and its new epoch."""
        for _ in range(100):
            found = self.ask(INIT_PRODUCER_ID, 1, _text(transactional_id) + struct.pack(">i", 60_000))
            _, error, producer, epoch = struct.unpack(">ihqh", found)
            if not error:
                return producer, epoch
            time.sleep(0.1)  # the coordinator is loading, or ends an earlier transaction
        raise AssertionError(f"no producer id: error {error}")

    def produce(self, transactional_id: str, producer: int, epoch: int, topic: str, partition: int) -> None:
        """Write the first record of this epoch."""
        batch = _batch(producer, epoch)
        body = _text(transactional_id) + struct.pack(">hii", -1, 10_000, 1) + _text(topic)
        body += struct.pack(">iii", 1, partition, len(batch)) + batch
        found = self.ask(PRODUCE, 3, body)
        (error,) = struct.unpack_from(">h", found, 4 + 2 + len(topic.encode()) + 4 + 4)
        assert not error, f"the broker refused the record: error {error}"

    def _read(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            part = self._socket.recv(size - len(found))
            assert part, "the broker closed the connection"
            found += part
        return found


def _text(text: str) -> bytes:
    return struct.pack(">h", len(text.encode())) + text.encode()


def _batch(producer: int, epoch: int) -> bytes:
    key, value = b"raw", b"1"
    record = b"\x00" + _varint(0) + _varint(0)
    record += _varint(len(key)) + key + _varint(len(value)) + value + _varint(0)
    records = _varint(len(record)) + record
    now = int(time.time() * 1000)
    rest = struct.pack(">hiqqqhii", _TRANSACTIONAL, 0, now, now, producer, epoch, 0, 1) + records
    head = struct.pack(">ibI", -1, 2, _crc32c(rest))
    return struct.pack(">qi", 0, len(head) + len(rest)) + head + rest


def _varint(number: int) -> bytes:
    left = (number << 1) ^ (number >> 63)
    found = bytearray()
    while left > 0x7F:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    found.append(left)
    return bytes(found)


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
