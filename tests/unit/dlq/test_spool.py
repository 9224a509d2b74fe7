from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.dlq import spool as spooling
from keylane.dlq import spool_format as frames
from keylane.dlq.spool import DeadLetterRefusedError, Spool, SpoolError, default_folder
from keylane.dlq.spool_format import MAGIC, SpooledDeadLetter, SpoolReader, frame
from keylane.errors import KeylaneError
from keylane.strict_json import MalformedRecordError

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(30)


def entry(number: int = 0, **more: Any) -> SpooledDeadLetter:
    given: dict[str, Any] = {
        "topic": "chat.dlq",
        "partition": number % 4,
        "key": b"k%d" % number,
        "value": b"value %d" % number,
        "headers": (("event-id", b"e%d" % number), ("keylane-app", b"chat"), ("a", None), ("a", b"")),
        "timestamp": 1_700_000_000_000 + number,
    }
    return SpooledDeadLetter(**{**given, **more})


class Topic:
    """Takes letters, up to one that it refuses."""

    def __init__(self, refuses: int | None = None) -> None:
        self.took: list[SpooledDeadLetter] = []
        self._refuses = refuses

    def send(self, letter: SpooledDeadLetter) -> Future[None]:
        answer: Future[None] = Future()
        if len(self.took) == self._refuses:
            answer.set_exception(KeylaneError("refused"))
        else:
            self.took.append(letter)
            answer.set_result(None)
        return answer


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", "chat", "c1")


def files(spool: Spool) -> list[Path]:
    return sorted(spool.folder.glob("*"))


def filled(spool: Spool, *numbers: int) -> Path:
    """One file with these letters, left by a process that has ended."""
    before = set(files(spool))
    other = Spool(spool.folder.parent.parent, "chat", "c1")
    for number in numbers:
        other.append(entry(number))
    other.close()
    (path,) = set(files(spool)) - before
    return path


# -- kept and shipped ----------------------------------------------------------------------------------------------


def test_letter_is_shipped_unchanged_and_its_file_removed(spool: Spool) -> None:
    letters = [
        entry(0),
        entry(1, key=None, value=None, headers=(), timestamp=None),
        entry(2, key=b"", value=b""),
    ]
    for letter in letters:
        spool.append(letter)
    assert spool.waiting() == 3
    topic = Topic()
    assert spool.ship(topic.send) == 3
    assert topic.took == letters
    assert (spool.waiting(), files(spool)) == (0, [])
    assert spool.ship(topic.send) == 0


binary = st.none() | st.binary(max_size=100)


@given(
    st.builds(
        SpooledDeadLetter,
        topic=st.text(st.characters(codec="utf-8"), max_size=20),
        partition=st.integers(0, 2**31 - 1),
        key=binary,
        value=binary,
        headers=st.lists(st.tuples(st.text(st.characters(codec="utf-8"), max_size=9), binary)).map(tuple),
        timestamp=st.none() | st.integers(0, 2**62),
    )
)
def test_any_letter_survives_the_file(
    tmp_path_factory: pytest.TempPathFactory, letter: SpooledDeadLetter
) -> None:
    path = tmp_path_factory.getbasetemp() / "one.spool"
    path.write_bytes(frame(letter) + frame(letter))
    with path.open("rb") as file:
        assert list(SpoolReader(file.fileno())) == [letter, letter]


def test_nothing_is_touched_before_the_first_letter(spool: Spool) -> None:
    assert (spool.waiting(), spool.ship(Topic().send)) == (0, 0)
    spool.close()
    assert not spool.folder.parent.parent.exists()


def test_a_letter_is_on_the_disk_and_private_when_append_returns(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    spool.append(entry())
    (path,) = files(spool)
    above = spool.folder.parent
    assert synced == [
        each.stat().st_ino for each in (above.parent.parent, above.parent, above, spool.folder, path)
    ]
    spool.append(entry())
    assert synced[5:] == [path.stat().st_ino]
    assert (path.stat().st_mode & 0o777, spool.folder.stat().st_mode & 0o777) == (0o600, 0o700)
    spool.close()


def test_apps_do_not_see_each_others_letters(spool: Spool) -> None:
    spool.append(entry())
    spool.close()
    assert Spool(spool.folder.parent.parent, "shop", "c1").waiting() == 0


def test_letters_repeat_until_their_file_is_acknowledged(spool: Spool) -> None:
    for number in range(5):
        spool.append(entry(number))
    with pytest.raises(KeylaneError, match="refused"):
        spool.ship(Topic(refuses=3).send)
    assert spool.waiting() == 5
    topic = Topic()
    assert spool.ship(topic.send) == 5
    assert [letter.key for letter in topic.took] == [b"k0", b"k1", b"k2", b"k3", b"k4"]


def test_refused_letter_stays_and_delays_no_other(spool: Spool) -> None:
    took: list[bytes | None] = []
    large = {b"k1", b"k3"}

    def send(letter: SpooledDeadLetter) -> Future[None]:
        answer: Future[None] = Future()
        if letter.key in large:
            answer.set_exception(DeadLetterRefusedError("too large"))
        else:
            took.append(letter.key)
            answer.set_result(None)
        return answer

    path = filled(spool, 0, 1, 2, 3, 4)
    assert spool.ship(send) == 3
    assert took == [b"k0", b"k2", b"k4"]
    assert spool.waiting() == 2
    assert files(spool) == [path]
    large.clear()
    assert spool.ship(send) == 2
    assert took[3:] == [b"k1", b"k3"]
    assert files(spool) == []


def test_file_is_shipped_in_windows_and_then_removed(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooling, "WINDOW_RECORDS", 2)
    path = filled(spool, *range(5))
    pending: list[Future[None]] = []
    sending = threading.Semaphore(0)

    def send(letter: SpooledDeadLetter) -> Future[None]:
        pending.append(Future())
        sending.release()
        return pending[-1]

    shipping = threading.Thread(target=spool.ship, args=(send,))
    shipping.start()
    for expected in (2, 4, 5):
        while len(pending) < expected:
            assert sending.acquire(timeout=5)
        shipping.join(0.02)
        assert (len(pending), path.exists(), shipping.is_alive()) == (expected, True, True)
        for future in pending:
            if not future.done():
                future.set_result(None)
    shipping.join(5)
    assert not path.exists()


def test_silent_topic_ends_shipping_and_letters_stay(spool: Spool) -> None:
    path = filled(spool, 0)
    with pytest.raises(SpoolError, match=r"no acknowledgement came within 0\.01 s"):
        spool.ship(lambda _: Future(), timeout=0.01)
    assert path.exists()
    assert spool.ship(Topic().send) == 1


def test_letters_can_be_appended_while_others_are_shipped(spool: Spool) -> None:
    spool.append(entry(0))
    topic = Topic()

    def send(letter: SpooledDeadLetter) -> Future[None]:
        spool.append(entry(1))
        return topic.send(letter)

    assert spool.ship(send) == 1
    assert spool.waiting() == 1
    assert spool.ship(topic.send) == 1
    assert [letter.key for letter in topic.took] == [b"k0", b"k1"]


def test_oldest_file_is_shipped_first(spool: Spool) -> None:
    paths = [filled(spool, number) for number in range(12)]  # …-10.spool comes before …-2.spool by name
    for age, path in enumerate(paths):
        os.utime(path, ns=(age * 10**9, age * 10**9))
    spool.append(entry(12))
    topic = Topic()
    assert spool.ship(topic.send) == 13
    assert [letter.key for letter in topic.took] == [b"k%d" % number for number in range(13)]
    assert files(spool) == []


def test_files_of_one_moment_are_shipped_as_they_were_made(spool: Spool) -> None:
    for path in [filled(spool, number) for number in range(12)]:
        os.utime(path, ns=(0, 0))
    topic = Topic()
    spool.ship(topic.send)
    assert [letter.key for letter in topic.took] == [b"k%d" % number for number in range(12)]


# -- two processes -------------------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from keylane.dlq.spool import Spool, SpooledDeadLetter
spool = Spool(Path(sys.argv[1]), "chat", "c1")
for number in range(3):
    key = b"w%d" % number
    spool.append(SpooledDeadLetter(topic="chat.dlq", partition=0, key=key, value=b"v", headers=(), timestamp=None))
print("written", flush=True)
sys.stdin.read()
"""


def test_only_files_of_dead_processes_are_shipped(spool: Spool) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(spool.folder.parent.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        topic = Topic()
        assert spool.waiting() == 3
        assert spool.ship(topic.send) == 0
        writer.kill()  # no chance to close anything
        writer.communicate()
        assert spool.ship(topic.send) == 3
    finally:
        writer.kill()
        writer.communicate()
    assert [letter.key for letter in topic.took] == [b"w0", b"w1", b"w2"]
    assert files(spool) == []


def test_two_that_ship_never_ship_the_same_file(spool: Spool) -> None:
    filled(spool, 0, 1)
    rival, seen = Spool(spool.folder.parent.parent, "chat", "c1"), Topic()
    topic = Topic()

    def send(letter: SpooledDeadLetter) -> Future[None]:
        assert rival.ship(seen.send) == 0
        return topic.send(letter)

    assert spool.ship(send) == 2
    assert seen.took == []


def test_file_shipped_before_its_lock_is_not_shipped_again(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = filled(spool, 0)
    real = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        real(fd, operation)
        path.unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    assert spool.ship(Topic().send) == 0


def test_new_file_removed_before_its_lock_is_not_used(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock
    taken: list[int] = []

    def flock(fd: int, operation: int) -> None:
        if not taken:
            taken.append(1)
            monkeypatch.setattr(fcntl, "flock", real)
            Spool(spool.folder.parent.parent, "chat", "c1").ship(
                Topic().send
            )  # finds an empty file that no process has locked
            monkeypatch.setattr(fcntl, "flock", flock)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    spool.append(entry())
    assert spool.waiting() == 1


# -- torn and damaged ----------------------------------------------------------------------------------------------


def test_torn_letter_is_skipped_and_earlier_ones_shipped(
    spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    path = filled(spool, 0, 1, 2)
    whole = path.read_bytes()
    last = len(whole) - len(frame(entry(2)))
    for size in range(last, len(whole)):
        path.write_bytes(whole[:size])
        topic = Topic()
        caplog.clear()
        assert spool.waiting() == 2
        assert spool.ship(topic.send) == 2
        assert topic.took == [entry(0), entry(1)]
        assert files(spool) == []
        assert ("of an unfinished dead letter" in caplog.text) == (size > last)


def test_readable_letters_of_a_damaged_file_are_shipped(
    spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    path = filled(spool, 0, 1, 2)
    whole = path.read_bytes()
    begin = len(frame(entry(0)))
    for place in range(begin, begin + len(frame(entry(1)))):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        topic = Topic()
        caplog.clear()
        assert spool.ship(topic.send) == 2
        assert topic.took == [entry(0), entry(2)]
        (aside,) = files(spool)
        assert aside == path.with_suffix(".damaged")
        assert "was damaged in 1 places" in caplog.text
        assert spool.waiting() == 0
        assert spool.ship(topic.send) == 0
        aside.unlink()


def test_wrong_last_letter_of_full_length_is_damage(spool: Spool) -> None:
    path = filled(spool, 0, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert spool.ship(Topic().send) == 1
    assert [each.suffix for each in files(spool)] == [".damaged"]


@pytest.mark.parametrize("rubbish", [b"rubbish", bytes(5000), b"KLX" * 9, MAGIC + b"\xff" * 70_000])
def test_garbage_between_letters_is_skipped(spool: Spool, rubbish: bytes) -> None:
    path = filled(spool, 0)
    path.write_bytes(rubbish + frame(entry(1)) + rubbish * 2 + frame(entry(2)))
    topic = Topic()
    assert spool.ship(topic.send) == 2
    assert topic.took == [entry(1), entry(2)]
    assert [each.suffix for each in files(spool)] == [".damaged"]


def test_a_letter_that_holds_letters_is_one_letter(spool: Spool) -> None:
    nested = entry(0, value=frame(entry(8)) + frame(entry(9)))
    path = filled(spool, 0)
    broken = bytearray(frame(nested))
    broken[-1] ^= 1
    path.write_bytes(frame(nested) + bytes(broken) + frame(entry(1)))
    topic = Topic()
    spool.ship(topic.send)
    assert topic.took == [nested, entry(1)]


# -- no room, no right ---------------------------------------------------------------------------------------------


def half_way(code: int, *, after: int) -> Callable[[int, Any], int]:
    """An os.write that takes a few bytes and then fails."""
    real, calls = os.write, iter(range(1000))

    def write(fd: int, data: Any) -> int:
        if next(calls) == 0:
            return real(fd, bytes(data)[:after])
        raise OSError(code, os.strerror(code))

    return write


@pytest.mark.parametrize("after", [1, 5, 30])
def test_a_write_that_fails_half_way_leaves_nothing_behind(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    spool.append(entry(0))
    with monkeypatch.context() as full:
        full.setattr(os, "write", half_way(errno.ENOSPC, after=after))
        with pytest.raises(SpoolError, match="No space left on device") as caught:
            spool.append(entry(1))
    assert str(files(spool)[0]) in str(caught.value)
    assert "KEYLANE_SPOOL" in str(caught.value)
    assert files(spool)[0].read_bytes() == frame(entry(0))
    spool.append(entry(2))
    topic = Topic()
    spool.ship(topic.send)
    assert topic.took == [entry(0), entry(2)]
    assert files(spool) == []


def test_unrepairable_file_is_left_for_a_new_one(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    spool.append(entry(0))
    with monkeypatch.context() as broken:
        broken.setattr(os, "write", half_way(errno.EIO, after=20))
        broken.setattr(os, "ftruncate", fail)
        with pytest.raises(SpoolError, match="Input/output error"):
            spool.append(entry(1))
    spool.append(entry(2))
    assert len(files(spool)) == 2
    topic = Topic()
    spool.ship(topic.send)
    assert topic.took == [entry(0), entry(2)]
    assert files(spool) == []


def test_a_letter_whose_file_cannot_be_synced_is_not_kept(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool.append(entry(0))
    real, calls = os.fsync, iter(range(100))

    def fsync(fd: int) -> None:
        if next(calls) == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fsync)
        with pytest.raises(SpoolError, match="Input/output error"):
            spool.append(entry(1))
    assert spool.waiting() == 1


def test_file_of_an_unstored_letter_is_removed(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(os, "write", half_way(errno.ENOSPC, after=3))
        with pytest.raises(SpoolError):
            spool.append(entry(0))
    spool.close()
    assert files(spool) == []


LIMITED = """
import resource, sys
from pathlib import Path
from keylane.dlq.spool import Spool, SpoolError, SpooledDeadLetter
spool = Spool(Path(sys.argv[1]), "chat", "c1")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
def keep(key, size):
    value = b"v" * size
    spool.append(SpooledDeadLetter(topic="chat.dlq", partition=0, key=key, value=value, headers=(), timestamp=None))
keep(b"first", 400)
try:
    keep(b"too large", 2000)
except SpoolError as error:
    print(error)
keep(b"second", 200)
"""


def test_full_disk_is_an_error_and_the_file_stays_usable(spool: Spool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(spool.folder.parent.parent)],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    assert "File too large. Make room there" in done.stdout
    topic = Topic()
    assert spool.ship(topic.send) == 2
    assert [letter.key for letter in topic.took] == [b"first", b"second"]
    assert files(spool) == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolError, match=r"for 'chat\.dlq' could not be kept in .*: Not a directory"):
        Spool(tmp_path / "file", "chat", "c1").append(entry())


def test_a_folder_without_the_right_to_write_is_an_error(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", refuse)  # the tests may run as root, which may do everything
    with pytest.raises(SpoolError, match=r"Permission denied\. Make room there or give this user the right"):
        spool.append(entry())


def test_unreadable_file_is_reported_and_others_shipped(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = filled(spool, 0)
    filled(spool, 1)
    real = os.open

    def refuse(path: Any, *more: Any) -> int:
        if path == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *more)

    monkeypatch.setattr(os, "open", refuse)
    assert spool.ship(Topic().send) == 1
    assert "cannot be read" in caplog.text
    assert closed.exists()


# -- where ---------------------------------------------------------------------------------------------------------


def test_the_folder_is_the_one_named_or_the_users_own_for_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/anna")
    monkeypatch.delenv("KEYLANE_SPOOL", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert default_folder() == Path("/home/anna/.local/state/keylane/spool")
    monkeypatch.setenv("XDG_STATE_HOME", "relative/is/ignored")
    assert default_folder() == Path("/home/anna/.local/state/keylane/spool")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_folder() == Path("/state/keylane/spool")
    monkeypatch.setenv("KEYLANE_SPOOL", "here")
    assert default_folder() == Path.cwd() / "here"


def test_missing_home_error_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KEYLANE_SPOOL", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(SpoolError, match="Set KEYLANE_SPOOL"):
        default_folder()


# -- files written by other programs ---------------------------------------------------------------------------------


def sealed(payload: bytes) -> bytes:
    """A frame whose checksum is right, whatever is in it."""
    length = len(payload).to_bytes(4, "big")
    return MAGIC + length + zlib.crc32(payload, zlib.crc32(length)).to_bytes(4, "big") + payload


FORGED = {
    "too short": b"abc",
    "negative lengths": struct.pack(">iqI", 0, 0, 2**32 - 1) + struct.pack(">i", -5) * 4,
    "headers without end": struct.pack(">iqI", 0, 0, 2**32 - 1) + struct.pack(">i", -1) * 3,
    "a length beyond its end": struct.pack(">iqI", 0, 0, 0) + struct.pack(">i", 2**31 - 1) * 3,
    "something behind it": frame(entry(1))[12:] + b"x",
    "no text": frame(entry(1))[12:].replace(b"chat.dlq", b"chat\xff\xff\xff\xff"),
    "a partition below 0": frame(entry(1, partition=-7))[12:],
    "nothing": b"",
}


@pytest.mark.parametrize("payload", FORGED.values(), ids=FORGED.keys())
def test_forged_frame_is_damage_and_delays_no_other(spool: Spool, payload: bytes) -> None:
    path = filled(spool, 1)
    path.write_bytes(sealed(payload) + path.read_bytes() + sealed(payload))
    topic = Topic()
    began = time.process_time()
    assert spool.ship(topic.send) == 1
    assert time.process_time() - began < 1
    assert topic.took == [entry(1)]
    assert [file.suffix for file in files(spool)] == [".damaged"]


def test_a_letter_for_another_topic_is_not_shipped(spool: Spool) -> None:
    path = filled(spool, 1)
    path.write_bytes(frame(entry(2, topic="chat.state")) + path.read_bytes())
    topic = Topic()
    assert spool.waiting() == 1
    assert spool.ship(topic.send) == 1
    assert topic.took == [entry(1)]
    assert [file.suffix for file in files(spool)] == [".damaged"]


@pytest.mark.parametrize("unit", [MAGIC, MAGIC + (500_000).to_bytes(4, "big") + b"abcd", b"\x00", MAGIC[:3]])
def test_a_file_that_only_looks_like_frames_is_read_quickly(spool: Spool, unit: bytes) -> None:
    path = filled(spool, 1)
    path.write_bytes(unit * (2_000_000 // len(unit)))
    began = time.process_time()
    assert spool.ship(Topic().send) == 0
    assert time.process_time() - began < 4


@given(st.binary(max_size=80))
def test_the_content_of_a_frame_is_a_letter_or_malformed(payload: bytes) -> None:
    with contextlib.suppress(MalformedRecordError):
        frames.decode(payload)


@given(st.data())
def test_a_changed_letter_is_a_letter_or_malformed(data: st.DataObject) -> None:
    payload = bytearray(frame(entry(1))[12:])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(payload) - 1))
        payload[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
        if not payload:
            break
    with contextlib.suppress(MalformedRecordError):
        assert frames.decode(frame(frames.decode(bytes(payload)))[12:]) == frames.decode(bytes(payload))
