"""Where a run takes place: the broker, the driver, the app, and the notes that everybody writes."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from campaign.handle import DriverError, running

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from campaign.handle import Driver
    from campaign.plan import Plan
    from campaign.proxy import Proxy
    from campaign.workload import Spec, TaskLine
    from keylane.broker import Broker
    from support.topics import Log


T = TypeVar("T")
_JUST_NOW_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Note:
    """Something that happened, at this moment (monotonic ns)."""

    at: int
    text: str


@dataclass(slots=True, kw_only=True)
class Zombie:
    """A worker that was stopped and went on after its replacement had begun."""

    pid: int
    owner: str
    stopped: int
    woken: int = 0


AFTERMATH_SECONDS = 3.0
"""Seconds after an outage in which a commit may still be late: clients reconnect, the coordinator loads."""


@dataclass(slots=True, kw_only=True)
class Scene:
    """One run's surroundings. `lifecycle` is held while the app is stopped, killed or started; lists only grow."""

    plan: Plan
    spec: Spec
    broker: Broker
    proxy: Proxy | None
    driver: Driver
    log: Log
    began: int = 0
    notes: list[Note] = field(default_factory=list)
    zombies: list[Zombie] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    """When progress was deleted from outside."""
    outages: list[tuple[int, int]] = field(default_factory=list)
    """From when to when commits could not be made, or not in time."""
    lifecycle: threading.RLock = field(default_factory=threading.RLock)

    def note(self, text: str) -> None:
        self.notes.append(Note(time.monotonic_ns(), text))

    def outage(self, began: int) -> None:
        """Commits could not be made from then until now."""
        self.outages.append((began, time.monotonic_ns() + int(AFTERMATH_SECONDS * 1e9)))

    def heard(self, event: dict[str, Any]) -> None:
        """Take an unsolicited event of the driver."""
        self.notes.append(Note(event["at"], f"driver: {event['event']}: {event.get('why', '')}"))

    def start_app(self) -> None:
        """Start the driver if it is dead, and the app in it."""
        with self.lifecycle:
            self.driver.ensure()
            self.driver.start(self.spec)

    def stop_app(self) -> None:
        """Stop the parts in order. A dead driver does not fail this: the app is stopped."""
        with self.lifecycle:
            try:
                self.driver.stop()
            except DriverError as error:
                if self.driver.alive:
                    raise
                self.note(f"the driver was dead when the app was to be stopped: {error}")

    def live_tasks(self) -> list[TaskLine]:
        """The tasks that run now, as far as can be told from outside: the newest of each process, in one epoch."""
        newest: dict[int, TaskLine] = {line.pid: line for line in self.spec.tasks()}
        stopped = {zombie.pid for zombie in self.zombies}
        alive = [line for pid, line in newest.items() if pid not in stopped and running(pid)]
        last = max((line.epoch for line in alive), default=0)
        return sorted((line for line in alive if line.epoch == last), key=lambda line: line.task)

    def is_busy(self, line: TaskLine) -> bool:
        """Whether its process has written into its history just now."""
        found = self._newest_history(line.pid)
        return found is not None and time.time() - found.stat().st_mtime < _JUST_NOW_SECONDS

    def lanes_of(self, line: TaskLine) -> str:
        """The owner, as the history names it, of the lanes in the task's process: they may be older than the task."""
        found = self._newest_history(line.pid)
        if found is None:
            return line.owner
        with found.open() as file:
            return str(json.loads(file.readline())["owner"])

    def _newest_history(self, pid: int) -> Path | None:
        files = self.spec.history.glob(f"*-{pid}-*.history")
        return max(files, key=lambda file: file.stat().st_mtime, default=None)

    def has_history(self, pid: int) -> bool:
        """Whether this process has run a message."""
        return self._newest_history(pid) is not None

    def await_task(
        self, after: int, seconds: float = 40.0, task: int | None = None, elsewhere: Collection[int] = ()
    ) -> TaskLine:
        """The first task that began after this moment. Raises TimeoutError without one.

        Of this number, if given, and in no process of ``elsewhere``.
        """

        def found() -> TaskLine | None:
            lines = [
                line
                for line in self.spec.tasks()
                if line.at > after and task in (None, line.task) and line.pid not in elsewhere
            ]
            return lines[0] if lines else None

        return wait_for(found, seconds, "a task began")


def wait_for(ask: Callable[[], T | None], seconds: float, what: str) -> T:
    """Ask until there is an answer. Raises TimeoutError after these seconds."""
    until = time.monotonic() + seconds
    while True:
        found = ask()
        if found is not None:
            return found
        if time.monotonic() > until:
            raise TimeoutError(f"waited {seconds:g} s in vain: {what}")
        time.sleep(0.02)
