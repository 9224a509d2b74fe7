"""The local copy of a partition's lane state: what counts after a restart, and what is discarded."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from keylane.engine.lane_state import StoredValue
from keylane.errors import KeylaneError
from keylane.offsets.slots import ALL, Slots, slot_of
from keylane.worker.value_file import ValueFile

if TYPE_CHECKING:
    from pathlib import Path

HALF, REST = Slots(0, 32767), Slots(32768, 65535)


def take(folder: Path, identity: str = "topic-1", slots: Slots = ALL, kept: float = 1000.0) -> ValueFile:
    return ValueFile.take(folder, "0", identity, slots, kept)


def put(file: ValueFile, offset: int, **values: bytes | None) -> None:
    file.write(
        [
            (key.encode(), "s/n", slot_of(key.encode(), 0), StoredValue(value, 0, offset))
            for key, value in values.items()
        ],
        offset,
    )


def content(file: ValueFile, key: str) -> bytes | None:
    found = file.get(key.encode(), "s/n")
    return None if found is None else found.content


def test_values_are_there_after_a_restart(tmp_path: Path) -> None:
    file = take(tmp_path)
    file.cover([ALL])
    put(file, 7, a=b"1", b=b"2")
    put(file, 9, b=None)
    file.close()
    file = take(tmp_path)
    assert (file.offset, file.covered) == (9, [ALL])
    assert (content(file, "a"), content(file, "b")) == (b"1", None)
    file.close()


def test_offset_never_goes_back(tmp_path: Path) -> None:
    file = take(tmp_path)
    put(file, 9, a=b"1")
    put(file, 3, a=b"2")
    assert file.offset == 9
    file.close()


@pytest.mark.parametrize(
    "reason", ["another topic", "too old", "from the future", "another format", "no meta"]
)
def test_odd_file_is_discarded(tmp_path: Path, reason: str) -> None:
    file = take(tmp_path)
    file.cover([ALL])
    put(file, 5, a=b"1")
    path = file.path
    file.close()
    if reason in ("too old", "from the future", "another format", "no meta"):
        new = {
            "too old": "json_set(value, '$.at', 5)",
            "from the future": f"json_set(value, '$.at', {time.time() + 9e9})",
            "another format": "json_set(value, '$.format', 99)",
            "no meta": "'{}'",
        }[reason]
        database = sqlite3.connect(path)
        with database:
            database.execute(f"UPDATE meta SET value = {new}")  # noqa: S608
        database.close()
    file = take(tmp_path, identity="topic-2" if reason == "another topic" else "topic-1")
    assert (file.offset, file.covered, file.count()) == (0, [], 0)
    file.close()


def test_damaged_file_is_discarded(tmp_path: Path) -> None:
    file = take(tmp_path)
    put(file, 5, a=b"1")
    path = file.path
    file.close()
    path.write_bytes(b"no database at all" * 1000)
    file = take(tmp_path)
    assert file.count() == 0
    put(file, 6, a=b"1")
    file.close()


def test_file_in_use_is_left_alone(tmp_path: Path) -> None:
    first = take(tmp_path)
    put(first, 5, a=b"1")
    second = take(tmp_path)
    assert second.path != first.path
    assert content(second, "a") is None
    first.close()
    second.close()


def test_file_that_has_the_slots_is_preferred(tmp_path: Path) -> None:
    first, second = take(tmp_path), take(tmp_path)
    first.cover([HALF])
    put(first, 5, a=b"1")
    second.cover([REST])
    put(second, 8, b=b"2")
    wanted = second.path
    first.close()
    second.close()
    found = take(tmp_path, slots=REST)
    assert (found.path, found.offset) == (wanted, 8)
    found.close()
    nothing = take(tmp_path, slots=ALL)
    assert nothing.path != wanted, "the first free one is built again"
    nothing.close()


def test_forgotten_slots_are_not_covered_and_have_no_values(tmp_path: Path) -> None:
    file = take(tmp_path)
    file.cover([ALL])
    put(file, 5, **{f"k{n}": b"1" for n in range(50)})
    file.forget(HALF)
    assert file.covered == [REST]
    for n in range(50):
        assert (content(file, f"k{n}") is None) == (slot_of(b"k%d" % n, 0) in HALF)
    file.close()


def test_due_values_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    file = take(tmp_path)
    file.write(
        [
            (b"k%d" % due, tag, 0, StoredValue(b"1", due, 0))
            for due in (30, 10, 20, 0)
            for tag in ("s/n", "t/n")
        ],
        1,
    )
    assert [(lane, tag) for lane, tag, *_ in file.due(25, "s/")] == [(b"k10", "s/n"), (b"k20", "s/n")]
    assert [lane for lane, *_ in file.due(99, "t/", after=10)] == [b"k20", b"k30"]
    assert (file.next_due("t/"), file.next_due("t/", after=10), file.next_due("t/", after=30)) == (
        10,
        20,
        None,
    )
    file.close()


def test_values_of_a_lane_are_found_together(tmp_path: Path) -> None:
    file = take(tmp_path)
    file.write([(b"k", tag, 0, StoredValue(tag.encode(), 0, 0)) for tag in ("s/a", "s/b")], 1)
    assert {tag: value.content for tag, value in file.lane(b"k").items()} == {"s/a": b"s/a", "s/b": b"s/b"}
    file.close()


def test_killed_process_leaves_a_usable_file(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from keylane.worker.value_file import ValueFile; from keylane.offsets.slots import ALL\n"
        "from keylane.engine.lane_state import StoredValue\n"
        "file = ValueFile.take(pathlib.Path(sys.argv[1]), '0', 'topic-1', ALL, 1000.0); file.cover([ALL])\n"
        "for n in range(1, 10**6):\n"
        "    file.write([(b'k%d' % i, 's/n', 0, StoredValue(b'%d' % n, 0, n)) for i in range(50)], n)\n"
        "    print(n, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = 0
    while last < 40:
        last = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    file = take(tmp_path)
    assert file.offset >= last
    assert {content(file, f"k{i}") for i in range(50)} == {b"%d" % file.offset}, "a batch is there as a whole"
    file.close()


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(KeylaneError, match=r"the local copy of lane state cannot be kept in .*KEYLANE_CACHE"):
        take(tmp_path / "file")


def test_file_that_fails_is_removed(tmp_path: Path) -> None:
    file = take(tmp_path)
    put(file, 5, a=b"1")
    file._writer.execute("DROP TABLE pairs")
    with pytest.raises(KeylaneError, match=r"failed and was removed.*builds it from the topic"):
        put(file, 6, a=b"1")
    assert not file.path.exists()
    file._lock_file.close()
