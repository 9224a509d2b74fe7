"""Embedded stores as a worker's local copy of lane state: sqlite3, LMDB and RocksDB, side by side.

    python -m bench.stores --keys 1000000

LMDB and RocksDB are measured when ``lmdb`` and ``rocksdict`` are installed; Keylane depends on neither. Every figure
comes from a process of its own. Records are written in the order of hashed keys, as messages come.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_BATCH = 10_000
_VALUE = random.Random(7).randbytes(150).hex()[:200].encode()
_GETS = 200_000
_LMDB_BYTES = 64 << 30
_CACHE_KIB = 16_384

Pair = tuple[bytes, bytes]


class Store(Protocol):
    """What is measured."""

    def write(self, batch: Sequence[Pair]) -> None:
        """Write these at once."""

    def get(self, key: bytes) -> bytes | None:
        """The value, or None."""

    def count(self) -> int:
        """All keys, counted by reading them."""

    def close(self) -> None:
        """Close it."""


class Sqlite:
    """A table without row ids, a write-ahead log, and no waiting for the disk."""

    def __init__(self, folder: Path) -> None:
        self._file = sqlite3.connect(folder / "values.sqlite", isolation_level=None)
        for pragma in (
            "journal_mode = WAL",
            "synchronous = OFF",
            f"cache_size = -{_CACHE_KIB}",
            "wal_autocheckpoint = 4000",
        ):
            self._file.execute(f"PRAGMA {pragma}")
        self._file.execute("CREATE TABLE IF NOT EXISTS pairs (k BLOB PRIMARY KEY, v BLOB) WITHOUT ROWID")

    def write(self, batch: Sequence[Pair]) -> None:
        """Write these at once."""
        self._file.execute("BEGIN")
        self._file.executemany("REPLACE INTO pairs VALUES (?, ?)", sorted(batch))
        self._file.execute("COMMIT")

    def get(self, key: bytes) -> bytes | None:
        """The value, or None."""
        row = self._file.execute("SELECT v FROM pairs WHERE k = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def count(self) -> int:
        """All keys."""
        return sum(1 for _ in self._file.execute("SELECT k, v FROM pairs"))

    def close(self) -> None:
        """Close it."""
        self._file.close()


class Lmdb:
    """One memory-mapped tree, no waiting for the disk."""

    def __init__(self, folder: Path) -> None:
        lmdb: Any = importlib.import_module("lmdb")
        self._env = lmdb.open(
            str(folder / "lmdb"), map_size=_LMDB_BYTES, sync=False, metasync=False, writemap=False
        )

    def write(self, batch: Sequence[Pair]) -> None:
        """Write these at once."""
        with self._env.begin(write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti(sorted(batch))

    def get(self, key: bytes) -> bytes | None:
        """The value, or None."""
        with self._env.begin() as transaction:
            found: bytes | None = transaction.get(key)
            return found

    def count(self) -> int:
        """All keys."""
        with self._env.begin() as transaction, transaction.cursor() as cursor:
            return sum(1 for _ in cursor.iternext())

    def close(self) -> None:
        """Close it."""
        self._env.close()


class Rocks:
    """A log-structured tree without a write-ahead log: what is in memory is lost with the process."""

    def __init__(self, folder: Path) -> None:
        self._rocks: Any = importlib.import_module("rocksdict")
        options = self._rocks.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(16 << 20)
        self._options = self._rocks.WriteOptions()
        self._options.disable_wal = True
        self._db = self._rocks.Rdict(str(folder / "rocks"), options)
        self._db.set_write_options(self._options)

    def write(self, batch: Sequence[Pair]) -> None:
        """Write these at once."""
        together = self._rocks.WriteBatch(raw_mode=True)
        for key, value in batch:
            together.put(key, value)
        self._db.write(together, self._options)

    def get(self, key: bytes) -> bytes | None:
        """The value, or None."""
        found: bytes | None = self._db.get(key)
        return found

    def count(self) -> int:
        """All keys."""
        return sum(1 for _ in self._db.items())

    def close(self) -> None:
        """Close it."""
        self._db.close()


KINDS: dict[str, Callable[[Path], Store]] = {"sqlite3": Sqlite, "lmdb": Lmdb, "rocksdict": Rocks}


def pairs(keys: int, begin: int = 0) -> Iterator[list[Pair]]:
    """Keys in a random order, in batches, with values of 200 bytes."""
    for first in range(begin, begin + keys, _BATCH):
        yield [(_key(n), _VALUE) for n in range(first, min(first + _BATCH, begin + keys))]


def _key(number: int) -> bytes:
    return b"customer-%016x" % (number * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)


def _memory() -> tuple[float, float]:
    """Resident memory of this process in MiB: all of it, and without pages of files."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines() if "kB" in line}
    return found["VmRSS"] / 1024, found["RssAnon"] / 1024


def measure(kind: str, folder: Path, keys: int) -> dict[str, float]:
    """All figures of one store."""
    base_all, base_own = _memory()
    store = KINDS[kind](folder)
    began = time.perf_counter()
    for batch in pairs(keys):
        store.write(batch)
    put = time.perf_counter() - began
    rng = random.Random(1)
    wanted = [_key(rng.randrange(keys)) for _ in range(_GETS)]
    began = time.perf_counter()
    for key in wanted:
        if store.get(key) is None:
            raise RuntimeError(f"{kind} has lost {key!r}")
    get = time.perf_counter() - began
    slowest = 0.0
    for batch in pairs(100_000, begin=0):  # overwrite: what a commit does
        began = time.perf_counter()
        store.write(batch)
        slowest = max(slowest, time.perf_counter() - began)
    began = time.perf_counter()
    found = store.count()
    scan = time.perf_counter() - began
    if found != keys:
        raise RuntimeError(f"{kind} has {found:,} keys, expected {keys:,}")
    everything, own = _memory()
    store.close()
    began = time.perf_counter()
    store = KINDS[kind](folder)
    store.get(_key(1))
    opened = time.perf_counter() - began
    store.close()
    size = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    return {
        "put_us": put / keys * 1e6,
        "get_us": get / _GETS * 1e6,
        "batch_ms": slowest * 1e3,
        "scan_s": scan,
        "open_ms": opened * 1e3,
        "disk_mib": size / 2**20,
        "resident_mib": everything - base_all,
        "own_mib": own - base_own,
    }


def _write_for_ever(kind: str, folder: Path, told: Any) -> None:
    store = KINDS[kind](folder)
    for number, batch in enumerate(pairs(100_000_000)):
        store.write(batch)
        told.send(number + 1)


def survive(kind: str, folder: Path) -> dict[str, float]:
    """Kill a process in the middle of its writes: what is there when the store is opened again."""
    lost, opened = 0, 0.0
    for number in range(3):
        place = folder / f"killed-{number}"
        place.mkdir()
        told, mouth = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=_write_for_ever, args=(kind, place, mouth))
        process.start()
        mouth.close()
        batches = 0
        while batches < 30 + 7 * number:
            batches = told.recv()
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        with suppress(EOFError):
            while told.poll():
                batches = told.recv()
        began = time.perf_counter()
        store = KINDS[kind](place)
        found = store.count()
        opened = max(opened, time.perf_counter() - began)
        lost = max(lost, batches * _BATCH - found)
        store.close()
    return {"lost_keys": lost, "reopen_s": opened}


def _in_process(function: Any, kind: str, *arguments: Any) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="keylane-stores-") as folder:
        context = multiprocessing.get_context("spawn")
        told, mouth = context.Pipe(duplex=False)
        process = context.Process(target=_tell, args=(mouth, function, kind, Path(folder), *arguments))
        process.start()
        mouth.close()
        try:
            found: dict[str, float] = told.recv()
        finally:
            process.join()
        return found


def _tell(mouth: Any, function: Any, *arguments: Any) -> None:
    mouth.send(function(*arguments))


def main() -> int:
    """Measure what is installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--only", default=",".join(KINDS))
    args = parser.parse_args()
    for kind in args.only.split(","):
        if kind != "sqlite3" and importlib.util.find_spec(kind) is None:
            print(f"{kind}: not installed")
            continue
        found = _in_process(measure, kind, args.keys) | _in_process(survive, kind)
        print(
            json.dumps({"store": kind, "keys": args.keys} | {n: round(v, 2) for n, v in found.items()}),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    import importlib.util

    sys.exit(main())
