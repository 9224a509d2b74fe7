"""Names of the topics that belong to an app."""

from __future__ import annotations


def dead_letter_topic(app: str) -> str:
    """The topic of the app's dead letters."""
    return f"{app}.dlq"


def state_topic(app: str) -> str:
    """The topic of the app's own state."""
    return f"{app}.state"


def lane_state_topic(app: str) -> str:
    """The topic of the values that the app's stages keep for their lanes, if any does."""
    return f"{app}.lane-state"


def ledger_topic(app: str) -> str:
    """The topic of the app's ledger, if it keeps one."""
    return f"{app}.ledger"


def telemetry_topic(app: str) -> str:
    """The topic of the app's telemetry, unless that is off."""
    return f"{app}.telemetry"


class AppTopicNames:
    """The topics of the app with this ``name``, as properties of a subclass."""

    __slots__ = ()
    name: str

    @property
    def dlq(self) -> str:
        """The topic of the app's dead letters."""
        return dead_letter_topic(self.name)

    @property
    def state(self) -> str:
        """The topic of the app's own state."""
        return state_topic(self.name)

    @property
    def lane_state(self) -> str:
        """The topic of the values that the app's stages keep for their lanes, if any does."""
        return lane_state_topic(self.name)

    @property
    def ledger_topic(self) -> str:
        """The topic of the app's ledger, if it keeps one."""
        return ledger_topic(self.name)

    @property
    def telemetry_topic(self) -> str:
        """The topic of the app's telemetry, unless that is off."""
        return telemetry_topic(self.name)
