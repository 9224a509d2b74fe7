"""What it takes to test an app: a harness in virtual time, histories of what ran when, and their judges."""

from keylane.testing.checker import check
from keylane.testing.clock import StuckError, VirtualLoop, run_virtual
from keylane.testing.faults import Crash, Drain, Fault, Pause, Redrive, Refuse, Release, Skip
from keylane.testing.harness import Harness, RunResult
from keylane.testing.history import Ended, Event, History, HistoryError, HistoryWriter, Kind, read_history
from keylane.testing.log import MemoryLog, MemoryRecord, murmur2, partition_of
from keylane.testing.results import check_results
from keylane.testing.sink import Dead, MemorySink, Written
from keylane.testing.verdict import (
    CheckFailed,
    Counts,
    Flaw,
    ResultsVerdict,
    Sent,
    Verdict,
    Violation,
)

__all__ = [
    "CheckFailed",
    "Counts",
    "Crash",
    "Dead",
    "Drain",
    "Ended",
    "Event",
    "Fault",
    "Flaw",
    "Harness",
    "History",
    "HistoryError",
    "HistoryWriter",
    "Kind",
    "MemoryLog",
    "MemoryRecord",
    "MemorySink",
    "Pause",
    "Redrive",
    "Refuse",
    "Release",
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
