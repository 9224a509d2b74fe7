"""Progress of fetching Kafka, shown as a bar on a terminal and as lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

LINE_INTERVAL_SECONDS = 10.0


class DownloadStep(StrEnum):
    """Steps before the first broker of a machine can start."""

    WAIT = "waiting for another process that fetches Kafka"
    FIND = "looking up Kafka's jars"
    FETCH = "fetching Kafka's jars"
    PREPARE = "preparing Kafka for a quick start"


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadProgress:
    """One report: `done` of `total` in this step. Reports may repeat, as a sign of life."""

    step: DownloadStep
    done: int
    total: int


OnProgress = Callable[[DownloadProgress], None]


def silent(_: DownloadProgress) -> None:
    """Show nothing."""


@contextmanager
def shown(stream: TextIO | None = None) -> Iterator[OnProgress]:
    """A callback that shows progress on stderr (or `stream`): a bar on a terminal, occasional lines elsewhere.

    Without a report nothing is shown. The bar is removed when the block ends.
    """
    stream = sys.stderr if stream is None else stream
    if stream.isatty():
        with _bar(stream) as callback:
            yield callback
        return
    lines = Lines(stream)
    yield lines
    lines.finish()


@contextmanager
def _bar(stream: TextIO) -> Iterator[OnProgress]:
    # Imported here, because most starts fetch nothing.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415
    from rich.progress import Progress as Bar  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Bar(*columns, console=Console(file=stream), transient=True)
    task = bar.add_task("", total=None)

    def show(progress: DownloadProgress) -> None:
        bar.start()
        bar.update(task, description=progress.step.value, completed=progress.done, total=progress.total)

    try:
        yield show
    finally:
        bar.stop()


class Lines:
    """Plain lines for logs: at the start of a step, every ten seconds, and at the end."""

    __slots__ = ("_began", "_last", "_reported", "_step", "_stream")

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._step: DownloadStep | None = None
        self._began = 0.0
        self._last = 0.0
        self._reported = 0.0

    def __call__(self, progress: DownloadProgress) -> None:
        """Take a report, and print a line if one is due."""
        now = self._reported = time.monotonic()
        if self._step is None:
            self._began = now
        if progress.step is self._step and now - self._last < LINE_INTERVAL_SECONDS:
            return
        self._step, self._last = progress.step, now
        counted = f" ({progress.done} of {progress.total})" if progress.total > 1 else ""
        self._print(f"{progress.step.value}{counted}")

    def finish(self) -> None:
        """Print the last line, if there was a first one."""
        if self._step is not None:
            self._print(f"Kafka is ready after {self._reported - self._began:.0f} s; later starts skip this")

    def _print(self, line: str) -> None:
        self._stream.write(f"keylane: {line}\n")
        self._stream.flush()
