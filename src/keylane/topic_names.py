"""Names of the topics that belong to an app."""

from __future__ import annotations


def dead_letter_topic(app: str) -> str:
    """The topic of the app's dead letters."""
    return f"{app}.dlq"


def state_topic(app: str) -> str:
    """The topic of the app's own state."""
    return f"{app}.state"


def ledger_topic(app: str) -> str:
    """The topic of the app's ledger, when it keeps one."""
    return f"{app}.ledger"
