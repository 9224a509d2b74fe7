"""What the report of a failed query comes down to: whose failure it is, and the one line that matters in it.

Spark hands over text: the traceback of the Python process that failed stands somewhere in it, among Java's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import AnalysisException, IllegalArgumentException

from keylane.errors import FloodError, KeylaneError, SettingsError, TakenOverError


class Kind(Enum):
    """Whether it makes sense to start the query again."""

    AGAIN = "again"
    """A part died, or something it needs was away: the next start may do better."""
    APP = "app"
    """The app does not import, or its settings were refused: it would fail in the same way."""
    FLOOD = "flood"
    TAKEN_OVER = "taken over"


_REMEDIES = {
    Kind.AGAIN: "",
    Kind.APP: "It is not started again: it would fail in the same way. Mend it, then run it anew",
    Kind.FLOOD: "It is not started again: it would go on turning messages into dead letters",
    Kind.TAKEN_OVER: "This run has ended and is not started again. Is it the one that should run? Stop the other first",
}
_FINAL: dict[type[KeylaneError], Kind] = {
    SettingsError: Kind.APP,
    FloodError: Kind.FLOOD,
    TakenOverError: Kind.TAKEN_OVER,
}
_BY_NAME = {final.__name__: kind for final, kind in _FINAL.items()}
_NOT_IMPORTED = ("ModuleNotFoundError", "ImportError")
_REFUSED = "[DATA_SOURCE_NOT_FOUND]"
_OURS = "keylane.errors."

_TRACEBACK = "Traceback (most recent call last):"
_TASK = re.compile(
    r"Task \d+ in stage [\d.]+ failed (\d+) times, most recent failure: "
    r"Lost task \S+ in stage \S+ \(TID \d+\) \(([^)]*)\): (.*)"
)
_UNANSWERED = re.compile(r"An error occurred while calling \S+")
_LONGEST = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a query ended."""

    kind: Kind
    line: str

    @property
    def final(self) -> bool:
        """Whether starting the query again is no use."""
        return self.kind is not Kind.AGAIN

    @property
    def remedy(self) -> str:
        """What the user can do when it is final."""
        return _REMEDIES[self.kind]


def cause(error: BaseException | None) -> Failure:
    """The cause of a failure: of a query (its ``exception()``), or of an attempt to start one (what that raised)."""
    if error is None:
        return Failure(kind=Kind.AGAIN, line="the query ended by itself")
    if isinstance(error, KeylaneError):
        kinds = [kind for final, kind in _FINAL.items() if isinstance(error, final)]
        return Failure(kind=kinds[0] if kinds else Kind.AGAIN, line=_short(str(error)))
    try:
        text = str(error)  # asks the JVM
    except (Py4JError, ConnectionError) as lost:
        error, text = lost, str(lost)
    if _is_lost(error, text):
        return Failure(kind=Kind.AGAIN, line="Spark's JVM is gone: it has ended, or was killed")
    found = _read(text.partition("\n=== Streaming Query ===")[0])
    if isinstance(error, AnalysisException | IllegalArgumentException):
        return Failure(kind=Kind.APP, line=found.line)
    return found


def _read(report: str) -> Failure:
    raised = _raised(report)
    if raised is not None:
        name, _, message = raised.partition(": ")
        if name.startswith(_OURS):
            kind = _BY_NAME.get(name.removeprefix(_OURS), Kind.AGAIN)
            return Failure(kind=kind, line=_short(message or name))
        return Failure(kind=Kind.APP if name in _NOT_IMPORTED else Kind.AGAIN, line=_short(raised))
    lines = [line.strip() for line in report.splitlines()]
    first = next((line for line in lines if line), "")
    if len(lines) > 1 and lines[1].startswith(": "):  # "An error occurred while calling o118.start."
        first = lines[1].partition(": ")[2].partition(": ")[2]
    task = _TASK.search(first)
    if task is not None:
        times, where, why = task.groups()
        if "Python worker exited unexpectedly" in why:
            first = (
                f"a Python worker ended unexpectedly, {times} times in a row: "
                "killed, out of memory, or crashed in native code"
            )
        else:
            first = f"a task failed {times} times on {where}: {why}"
    elif first.endswith("(no cause message)"):
        first = "Spark gave no reason; its planner process, or one of its own threads, has died"
    if not first or first == _TRACEBACK:
        first = "the query failed and gave no reason"
    return Failure(kind=Kind.APP if _REFUSED in first else Kind.AGAIN, line=_short(first))


def _is_lost(error: BaseException, text: str) -> bool:
    if isinstance(error, Py4JError):  # one without a word of Java's has no answer in it
        return isinstance(error, Py4JNetworkError) or _UNANSWERED.fullmatch(text) is not None
    return isinstance(error, ConnectionError)


def _raised(report: str) -> str | None:
    """The line that names the exception: the first one after the last traceback that is not indented."""
    _, found, after = report.rpartition(_TRACEBACK)
    if not found:
        return None
    return next((line for line in after.splitlines() if line and not line[0].isspace()), None)


def _short(line: str) -> str:
    line = re.sub(r"\s*SQLSTATE: \w+\s*$", "", " ".join(line.split()))
    return line if len(line) < _LONGEST else line[: _LONGEST - 1] + "…"
