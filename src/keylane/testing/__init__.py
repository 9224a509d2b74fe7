"""Tools to test an app: a harness in virtual time, a log in memory, histories of attempts, and their checkers."""

from keylane.audit.violation import EventKind, Flaw, HistoryEvent, Violation
from keylane.testing.checker import check
from keylane.testing.clock import StuckError, VirtualLoop, run_virtual
from keylane.testing.faults import (
    Crash,
    Drain,
    Fault,
    Hold,
    Pause,
    Recreate,
    Recut,
    Redrive,
    Refuse,
    Reject,
    Release,
    Reset,
    Skip,
)
from keylane.testing.harness import Harness, RunResult
from keylane.testing.history import (
    Ended,
    History,
    HistoryError,
    HistoryWriter,
    read_history,
)
from keylane.testing.log import MemoryLog, MemoryRecord, murmur2, partition_of
from keylane.testing.results import check_results
from keylane.testing.sink import Dead, MemorySink, Written
from keylane.testing.verdict import (
    CheckFailed,
    Counts,
    ResultsVerdict,
    Sent,
    Verdict,
)

__all__ = [
    "CheckFailed",
    "Counts",
    "Crash",
    "Dead",
    "Drain",
    "Ended",
    "EventKind",
    "Fault",
    "Flaw",
    "Harness",
    "History",
    "HistoryError",
    "HistoryEvent",
    "HistoryWriter",
    "Hold",
    "MemoryLog",
    "MemoryRecord",
    "MemorySink",
    "Pause",
    "Recreate",
    "Recut",
    "Redrive",
    "Refuse",
    "Reject",
    "Release",
    "Reset",
    "ResultsVerdict",
    "RunResult",
    "Sent",
    "Skip",
    "StuckError",
    "Verdict",
    "Violation",
    "VirtualLoop",
    "Written",
    "check",
    "check_results",
    "murmur2",
    "partition_of",
    "read_history",
    "run_virtual",
]
