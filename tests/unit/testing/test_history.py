from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from keylane.testing import Ended, EventKind, HistoryError, HistoryEvent, HistoryWriter, read_history

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Msg:
    key: bytes | None = b"k"
    partition: int = 0
    offset: int = 0
    attempt: int = 1


def outcomes(folder: Path) -> list[tuple[EventKind, int, str | None]]:
    return [(event.kind, event.offset, event.outcome) for event in read_history(folder)]


def test_written_events_are_read_back(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    writer.start(Msg(key=b"\x00 \n\xff", partition=3, offset=2**40, attempt=7))
    writer.end(Msg(key=b"\x00 \n\xff", partition=3, offset=2**40, attempt=7), "gave up, for now")
    start, end = read_history(tmp_path)
    assert start == HistoryEvent(
        EventKind.START, b"\x00 \n\xff", 3, 2**40, 7, str(os.getpid()), start.at, start.seq, outcome=None
    )
    assert end[:6] == (EventKind.END, *start[1:6])
    assert end.outcome == "gave up, for now"
    assert start.seq <= end.seq
    assert 0 <= end.at - start.at < 10


@pytest.mark.parametrize("key", [None, b"", b"-", b"x", "schlüssel".encode()])
def test_every_key_survives(tmp_path: Path, key: bytes | None) -> None:
    HistoryWriter(tmp_path).start(Msg(key=key))
    assert read_history(tmp_path).events[0].key == key


def test_attempt_is_recorded_around_its_body(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    with writer.attempt(Msg(offset=1)):
        assert outcomes(tmp_path) == [(EventKind.START, 1, None)]
    assert outcomes(tmp_path) == [(EventKind.START, 1, None), (EventKind.END, 1, "ok")]


def test_exception_is_recorded_as_failed_and_raised(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    with pytest.raises(KeyError), writer.attempt(Msg()):
        raise KeyError
    assert outcomes(tmp_path)[-1] == (EventKind.END, 0, Ended.FAILED)


def test_the_body_can_name_the_outcome(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path).attempt(Msg()) as attempt:
        attempt.outcome = Ended.DEAD
    assert outcomes(tmp_path)[-1] == (EventKind.END, 0, "dead")


def test_a_cancelled_stage_is_recorded_as_cancelled(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)

    async def stage() -> None:
        with writer.attempt(Msg()):
            await asyncio.sleep(30)

    async def run() -> None:
        async with asyncio.timeout(0.01):
            await stage()

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert outcomes(tmp_path)[-1] == (EventKind.END, 0, Ended.CANCELLED)


def test_the_attempt_keeps_the_numbers_it_started_with(tmp_path: Path) -> None:
    class Mutable:
        key, partition, offset, attempt = b"k", 0, 0, 1

    msg = Mutable()
    with HistoryWriter(tmp_path).attempt(msg):
        msg.attempt = 2
    assert [event.attempt for event in read_history(tmp_path)] == [1, 1]


@pytest.mark.parametrize("outcome", ["", "two\nlines", "end\n", "a\rb"])
def test_an_outcome_is_one_line(tmp_path: Path, outcome: str) -> None:
    with pytest.raises(ValueError, match="one line"):
        HistoryWriter(tmp_path).end(Msg(), outcome)


def test_pickled_writer_opens_its_own_file(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, owner="task 3/1")
    writer.start(Msg())
    copy = pickle.loads(pickle.dumps(writer))  # noqa: S301 - our own
    copy.end(Msg())
    assert len(list(tmp_path.glob("*.history"))) == 2
    assert {event.owner for event in read_history(tmp_path)} == {f"task 3/1@{os.getpid()}"}


def test_closed_writer_continues_in_a_new_file(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    writer.start(Msg())
    writer.close()
    writer.close()
    writer.end(Msg())
    assert len(read_history(tmp_path)) == 2


def test_threads_may_share_a_writer(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)

    def work(partition: int) -> None:
        for offset in range(200):
            with writer.attempt(Msg(partition=partition, offset=offset)):
                pass

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = read_history(tmp_path)
    assert len(history) == 1600
    assert all(a.seq <= b.seq for a, b in zip(history.events, history.events[1:], strict=False))


CHILD = textwrap.dedent(
    """
    import os, signal, sys
    from types import SimpleNamespace
    from keylane.testing import HistoryWriter
    writer = HistoryWriter(sys.argv[1], owner="child")
    for offset in range(1000):
        with writer.attempt(SimpleNamespace(key=b"k", partition=0, offset=offset, attempt=1)):
            if offset == 999:
                os.kill(os.getpid(), signal.SIGKILL)
    """
)


def test_events_written_before_a_kill_survive(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    history = read_history(tmp_path)
    assert len(history) == 1999
    assert (history.events[-1].kind, history.events[-1].offset) == (EventKind.START, 999)
    assert history.torn == 0


def test_a_forked_process_is_another_owner(tmp_path: Path) -> None:
    code = """
    import os, sys
    from types import SimpleNamespace
    from keylane.testing import HistoryWriter
    writer = HistoryWriter(sys.argv[1])
    writer.start(SimpleNamespace(key=b"k", partition=0, offset=0, attempt=1))
    child = os.fork()
    writer.start(SimpleNamespace(key=b"k", partition=0, offset=1 if child else 2, attempt=1))
    if child:
        os.waitpid(child, 0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], check=True)
    owners = {event.offset: event.owner for event in read_history(tmp_path)}
    assert owners[0] == owners[1] != owners[2]


def test_files_are_merged_in_the_order_of_the_shared_clock(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    writer.start(Msg(offset=5))
    subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], check=False)
    writer.end(Msg(offset=5))
    history = read_history(tmp_path)
    assert history.events[0].offset == history.events[-1].offset == 5
    assert {event.owner.split("@")[0] for event in history.events[1:-1]} == {"child"}


def test_a_torn_last_line_is_left_out_and_counted(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    writer.start(Msg())
    writer.end(Msg())
    (path,) = tmp_path.glob("*.history")
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        history = read_history(tmp_path)
        assert len(history) == max(0, whole[:cut].count(b"\n") - 1)
        assert history.torn == (cut > 0 and whole[cut - 1 : cut] != b"\n")


@pytest.mark.parametrize(
    "line", ["", "s 1 2", "q 1 0 0 1 x", "s 1 0 0 1 k", "s 1 0 0 1 x00 ok", "e 1 0 0 1 x00", "s a 0 0 1 -"]
)
def test_error_names_a_line_that_is_not_an_event(tmp_path: Path, line: str) -> None:
    writer = HistoryWriter(tmp_path)
    writer.start(Msg())
    (path,) = tmp_path.glob("*.history")
    with path.open("a") as file:
        file.write(f"{line}\n")
    writer.end(Msg())
    with pytest.raises(HistoryError, match=r"line 3 of .*\.history is not an event"):
        read_history(tmp_path)


@pytest.mark.parametrize("head", ["hello", "{}", "[]", '{"format": 2, "owner": "a", "wall": 1}'])
def test_error_names_a_file_that_is_not_a_history(tmp_path: Path, head: str) -> None:
    (tmp_path / "a.history").write_text(f"{head}\n")
    with pytest.raises(HistoryError, match=r"a\.history"):
        read_history(tmp_path)


def test_missing_folder_is_an_error_and_an_empty_one_is_not(tmp_path: Path) -> None:
    assert len(read_history(tmp_path)) == 0
    with pytest.raises(HistoryError, match="does not exist"):
        read_history(tmp_path / "nowhere")
