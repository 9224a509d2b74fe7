"""Signals and the time they leave, with processes that do nothing but wait."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from keylane.cli.signals import AbandonedError, StopSignals

SCRIPT = """
import sys, threading, time
from keylane.cli.signals import AbandonedError, StopSignals

def say(line):
    print(line, flush=True)

stopper = StopSignals(say)

def wait_for_stop():
    say("ready")
    while not stopper.asked:
        time.sleep(0.01)

{work}

try:
    say("the end: " + stopper.guard(work))
except AbandonedError as left:
    say(f"abandoned: {{left}}")
    sys.exit(left.code)
"""


def run(work: str, *signals: int, apart: float = 0.0, after: str = "ready") -> tuple[int, list[str], float]:
    """Its exit code, its lines, and the seconds it took from the last signal on."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(work=work)], stdout=subprocess.PIPE, text=True
    )
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            if after in line:
                break
        for number in signals:
            process.send_signal(number)
            time.sleep(apart)
        began = time.monotonic()
        lines += process.communicate(timeout=20)[0].splitlines()
        return process.returncode, lines, time.monotonic() - began
    finally:
        process.kill()
        process.wait()


DRAINS = """
def work():
    stopper.runs(20)
    wait_for_stop()
    time.sleep(0.3)
    return "drained"
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_work_ends_itself(number: int) -> None:
    code, lines, _ = run(DRAINS, number)
    assert code == 0
    assert "stopping: messages in flight are finished and committed first, within 20 s" in lines[1]
    assert "second signal ends the run at once" in lines[1]
    assert lines[2] == "the end: drained"


HANGS = """
def work():
    stopper.runs({seconds})
    wait_for_stop()
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_it_now(number: int) -> None:
    code, lines, took = run(HANGS.format(seconds=50), number, number, apart=0.3)
    assert code == 128 + number
    assert lines[-1] == "abandoned: ended without a drain: messages in flight run again next time"
    assert took < 5


def test_work_that_does_not_end_in_time_is_abandoned() -> None:
    code, lines, took = run(HANGS.format(seconds=0.5), signal.SIGTERM)
    assert code == 4
    assert "Spark did not end within 0.5 s" in lines[-1]
    assert "Nothing is lost" in lines[-1]
    assert took < 5


def test_every_phase_of_a_stop_has_its_own_time() -> None:
    work = """
def work():
    stopper.runs(0.5)
    wait_for_stop()
    for _ in range(3):
        time.sleep(0.3)
        stopper.runs(0.5)
    return "drained"
"""
    code, lines, _ = run(work, signal.SIGTERM)
    assert (code, lines[-1]) == (0, "the end: drained")


def test_end_is_bounded_without_a_stop_request() -> None:
    work = """
def work():
    stopper.runs(0.2)
    time.sleep(0.5)
    stopper.runs(0.5, always=True)
    say("ready")
    time.sleep(60)
"""
    code, lines, took = run(work)
    assert code == 4
    assert "Spark did not end within 0.5 s" in lines[-1]
    assert took < 5


BEFORE = """
def work():
    return ""
try:
    say("ready")
    time.sleep(60)
except AbandonedError as left:
    say(f"abandoned: {left}")
    sys.exit(left.code)
"""


@pytest.mark.parametrize(
    "work",
    [
        'def work():\n    say("ready")\n    time.sleep(60)',
        # The main thread is in the middle of something, as while the app is imported.
        BEFORE,
        # It runs on into the next phase before the main thread has looked.
        "stopper._mind = lambda: None\ndef work():\n    wait_for_stop()\n    stopper.runs(5)",
    ],
    ids=["waiting", "before", "on the way"],
)
def test_when_nothing_runs_it_ends_at_once(work: str) -> None:
    code, lines, took = run(work, signal.SIGTERM)
    assert code == 0
    assert lines[-1] == "abandoned: stopped: nothing was running"
    assert took < 5


def test_signal_during_the_apps_import_is_kept() -> None:
    work = (
        BEFORE.replace('return ""', "time.sleep(60)").partition("except")[0]
        + "except BaseException:\n    pass\n"
    )
    code, lines, _ = run(work, signal.SIGTERM)
    assert (code, lines[-1]) == (0, "abandoned: stopped: nothing was running")


def test_unread_output_delays_no_stop() -> None:
    work = """
def block(line):
    time.sleep(60)
stopper._say = block
def work():
    stopper.runs(20)
    wait_for_stop()
    return "drained"
"""
    code, lines, took = run(work, signal.SIGTERM)
    assert (code, lines[-1]) == (0, "the end: drained")
    assert took < 5


def test_the_works_own_error_comes_through() -> None:
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        stopper = StopSignals(print)
        with pytest.raises(ZeroDivisionError):
            stopper.guard(lambda: 1 / 0)
        assert StopSignals(print).guard(lambda: 7) == 7
        assert not stopper.asked
    finally:
        signal.signal(signal.SIGTERM, handlers[0])
        signal.signal(signal.SIGINT, handlers[1])
    assert not issubclass(AbandonedError, Exception)


def test_process_ends_despite_a_hanging_thread() -> None:
    script = (
        "import threading, time\nfrom keylane.cli import signals\nsignals._EXIT_SECONDS_MAX = 0.3\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\nsignals.last_resort(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=20, check=False).returncode == 7
