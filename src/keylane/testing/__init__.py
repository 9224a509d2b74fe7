"""What it takes to test an app: histories of what ran when, and the judges of order, loss and repeats."""

from keylane.testing.checker import check
from keylane.testing.history import Ended, Event, History, HistoryError, HistoryWriter, Kind, read_history
from keylane.testing.results import check_results
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
    "Ended",
    "Event",
    "Flaw",
    "History",
    "HistoryError",
    "HistoryWriter",
    "Kind",
    "ResultsVerdict",
    "Sent",
    "Verdict",
    "Violation",
    "check",
    "check_results",
    "read_history",
]
