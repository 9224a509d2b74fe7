"""Faults of Keylane's own, put into a task's process to see that the judge finds them. Never used but for that."""

from __future__ import annotations

from keylane.offsets.watermark import PartitionProgress, Watermark

COMMIT_AHEAD = "commit-ahead"
"""Progress says that everything that was read is done."""

_honest = Watermark.progress


def apply(breaks: str) -> None:
    """Break it, or repair it with ``""``: a worker process is used again for other runs."""
    Watermark.progress = _ahead if breaks == COMMIT_AHEAD else _honest  # type: ignore[method-assign]


def _ahead(self: Watermark) -> PartitionProgress:
    honest = _honest(self)
    return PartitionProgress(watermark=honest.position, position=honest.position)
