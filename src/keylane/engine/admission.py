"""Admission of lanes to a stage: the error of a lane that has to wait, without an attempt being used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from keylane.engine.delivery import Delivery
    from keylane.lanes.lane_table import Lane


class LaneGate(Protocol):
    """What lanes wait for. It resumes them by itself."""

    def wait(self, lane: Lane[Delivery]) -> None:
        """Queue a lane, which is suspended."""


class NotAdmittedError(Exception):
    """The stage may not be called now. Internal to the engine; it does not count as an attempt."""

    def __init__(self, gate: LaneGate, why: str) -> None:
        super().__init__(why)
        self.gate = gate
