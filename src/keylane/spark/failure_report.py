"""The cause of a failed query: the kind of failure, and the one line of the report that matters.

Spark reports text: the traceback of the failed Python process is somewhere in it, among Java's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import AnalysisException, IllegalArgumentException

from keylane.errors import AccessDeniedError, FailureGuardError, KeylaneError, SettingsError, TakenOverError


class QueryFailureKind(Enum):
    """Kind of failure, which decides whether to restart the query."""

    AGAIN = "again"
    """A process died, or something it needs was unreachable: a restart may help."""
    APP = "app"
    """The app does not import, or its settings were refused: it would fail the same way again."""
    DENIED = "denied"
    """The broker denied a right or the login."""
    FAILURE_GUARD = "failure_guard"
    TAKEN_OVER = "taken over"


_REMEDIES = {
    QueryFailureKind.AGAIN: "",
    QueryFailureKind.APP: "Not restarting: it would fail the same way again. Fix it, then run it again",
    QueryFailureKind.DENIED: (
        "Not restarting: the broker would deny it again. 'keylane doctor' checks all rights. Nothing is lost"
    ),
    QueryFailureKind.FAILURE_GUARD: "Not restarting: it would continue to turn messages into dead letters",
    QueryFailureKind.TAKEN_OVER: (
        "This run has ended and will not restart. If it is the one that should run, stop the other first"
    ),
}
_FINAL: dict[type[KeylaneError], QueryFailureKind] = {
    SettingsError: QueryFailureKind.APP,
    AccessDeniedError: QueryFailureKind.DENIED,
    FailureGuardError: QueryFailureKind.FAILURE_GUARD,
    TakenOverError: QueryFailureKind.TAKEN_OVER,
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
_REASON_CHARACTERS_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryFailure:
    """The cause of a query's end."""

    kind: QueryFailureKind
    line: str

    @property
    def final(self) -> bool:
        """Whether a restart would not help."""
        return self.kind is not QueryFailureKind.AGAIN

    @property
    def remedy(self) -> str:
        """What the user can do if it is final."""
        return _REMEDIES[self.kind]


def cause(error: BaseException | None) -> QueryFailure:
    """Return the cause of a query's failure (its ``exception()``), or of a failed attempt to start one."""
    if error is None:
        return QueryFailure(kind=QueryFailureKind.AGAIN, line="the query ended by itself")
    if isinstance(error, KeylaneError):
        kinds = [kind for final, kind in _FINAL.items() if isinstance(error, final)]
        return QueryFailure(kind=kinds[0] if kinds else QueryFailureKind.AGAIN, line=_short(str(error)))
    try:
        text = str(error)  # asks the JVM
    except (Py4JError, ConnectionError) as lost:
        error, text = lost, str(lost)
    if _is_lost(error, text):
        return QueryFailure(kind=QueryFailureKind.AGAIN, line="Spark's JVM ended or was killed")
    found = _read(text.partition("\n=== Streaming Query ===")[0])
    if isinstance(error, AnalysisException | IllegalArgumentException):
        return QueryFailure(kind=QueryFailureKind.APP, line=found.line)
    return found


def _read(report: str) -> QueryFailure:
    raised = _raised(report)
    if raised is not None:
        name, _, message = raised.partition(": ")
        if name.startswith(_OURS):
            kind = _BY_NAME.get(name.removeprefix(_OURS), QueryFailureKind.AGAIN)
            return QueryFailure(kind=kind, line=_short(message or name))
        return QueryFailure(
            kind=QueryFailureKind.APP if name in _NOT_IMPORTED else QueryFailureKind.AGAIN,
            line=_short(raised),
        )
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
    return QueryFailure(
        kind=QueryFailureKind.APP if _REFUSED in first else QueryFailureKind.AGAIN, line=_short(first)
    )


def _is_lost(error: BaseException, text: str) -> bool:
    if isinstance(error, Py4JError):  # without Java's report, the JVM did not answer
        return isinstance(error, Py4JNetworkError) or _UNANSWERED.fullmatch(text) is not None
    return isinstance(error, ConnectionError)


def _raised(report: str) -> str | None:
    """Find the line with the exception: the first unindented one after the last traceback."""
    _, found, after = report.rpartition(_TRACEBACK)
    if not found:
        return None
    return next((line for line in after.splitlines() if line and not line[0].isspace()), None)


def _short(line: str) -> str:
    line = re.sub(r"\s*SQLSTATE: \w+\s*$", "", " ".join(line.split()))
    return line if len(line) < _REASON_CHARACTERS_MAX else line[: _REASON_CHARACTERS_MAX - 1] + "…"
