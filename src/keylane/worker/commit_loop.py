"""Commits of one task: at the app's interval, soon for records that lanes wait for, and once at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from keylane.errors import AbortedError, BrokerError, FencedError, KeylaneError
from keylane.state.ownership import LEAVING_EVERY_SECONDS
from keylane.worker.commit import commit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from keylane.spec import AppSpec
    from keylane.state.ownership import Ownership
    from keylane.state.topic import StateTopic
    from keylane.worker.commit import Contributor
    from keylane.worker.session import WorkerSession

log = logging.getLogger("keylane.task")

LAST_COMMIT_TRIES = 5
_CHECK_SECONDS = 0.1
_RECORD_SECONDS = 0.005
"""The time until a record that a lane waits for is written."""
_OTHER_OWNERS_SECONDS = 5.0
"""How long the leader of a partition's owners waits for the others at the end."""
_OWNERSHIP_KNOWN_SECONDS = 30.0


class CommitLoop:
    """Commits what is done, and replaces the transactional client when it can do nothing more.

    ``contributors`` fill every commit, in this order. ``pause``: seconds by which the next commit is put off.
    Used on the loop.
    """

    def __init__(
        self,
        app: AppSpec,
        worker_session: WorkerSession,
        state: StateTopic,
        ownership: Ownership,
        owner: str,
        *,
        pause: Callable[[], float],
    ) -> None:
        self._exact = app.delivery == "exactly_once"
        self._interval = app.commit_interval
        self._state_topic = app.state
        self._writer = worker_session.writer
        self._cluster = worker_session.cluster
        self._state = state
        self._ownership = ownership
        self._owner = owner
        self._pause = pause
        self.contributors: list[Contributor] = []
        self.leaving = False
        """Whether others take over; the worker then says again and again that it is leaving."""
        self._committing: asyncio.Future[None] | None = None
        self._replacing: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Commit until cancelled. Raises AbortedError with ``exactly_once``, FencedError and BrokerError."""
        writer = self._writer
        due, said = time.monotonic() + self._interval, 0.0
        while True:
            now = time.monotonic()
            try:
                writer.check()
                if self.leaving and now - said > LEAVING_EVERY_SECONDS:
                    said = now
                    self._ownership.leaving()
                if now >= due:
                    await self.commit()
                    due = max(due + self._interval, time.monotonic()) + self._pause()
                elif writer.has_records and not self._exact:
                    await writer.commit()
            except AbortedError as error:
                if self._exact:
                    raise
                if writer.failed:
                    await self._replace_client(error)
                else:
                    log.warning(
                        "commit failed, retrying owner=%s in_seconds=%g reason=%s",
                        self._owner,
                        self._interval,
                        error,
                    )
                due = time.monotonic() + self._interval
            wait = max(0.0, min(due - time.monotonic(), _CHECK_SECONDS))
            if writer.has_records or self._exact:
                await asyncio.sleep(min(wait, _RECORD_SECONDS))
            else:
                await writer.wait_for_record(wait)

    async def commit(self, *also: Contributor, last: bool = False, tidy: bool = False) -> None:
        """Commit what is done now, with the records of ``also``.

        A caller that is cancelled leaves the commit running; the next caller waits for it.
        """
        while self._committing is not None and not self._committing.done():
            await asyncio.wait([self._committing])
        contributors = [*self.contributors, *also]
        self._committing = asyncio.ensure_future(commit(self._writer, contributors, last=last, tidy=tidy))
        self._committing.add_done_callback(_retrieve_exception)
        await asyncio.shield(self._committing)

    async def commit_epoch(self, records: Contributor) -> bool:
        """Commit at the end of an epoch. False if that failed and is to be tried again with the next commit.

        Raises AbortedError with ``exactly_once``, FencedError and BrokerError.
        """
        try:
            await self.commit(records, tidy=True)
        except AbortedError as error:
            if self._exact:
                raise
            log.warning("commit at the end of the epoch failed owner=%s reason=%s", self._owner, error)
            return False
        return True

    async def commit_release(self, release: Contributor) -> None:
        """Commit what is done with the release of a range, also if that needs a new client.

        Raises AbortedError with ``exactly_once``, FencedError and BrokerError.
        """
        for tries_left in reversed(range(LAST_COMMIT_TRIES)):
            try:
                await self.commit(release)
                break
            except AbortedError as error:
                if self._exact or not tries_left:
                    raise
                if self._writer.failed:
                    await self._replace_client(error)
                else:
                    log.warning("release of a range failed, retrying owner=%s reason=%s", self._owner, error)
                    await asyncio.sleep(_CHECK_SECONDS)

    async def commit_last(self, last: Contributor, *, shared: Sequence[int], failed: bool) -> None:
        """Commit for the last time, with ``last``.

        The leader of the owners of a ``shared`` partition waits for the others first. After a failure the commit may
        fail too: then the messages run again.
        """
        if not failed:
            await self._wait_for_other_owners(shared)
        with contextlib.suppress(KeylaneError) if failed else contextlib.nullcontext():
            for tries_left in reversed(range(LAST_COMMIT_TRIES)):
                try:
                    await self.commit(last, last=True)
                    break
                except AbortedError as error:
                    if self._exact or not tries_left:
                        raise
                    if self._writer.failed:
                        await self._replace_client(error)
                    else:
                        log.warning(
                            "last commit failed, retrying owner=%s tries_left=%d reason=%s",
                            self._owner,
                            tries_left,
                            error,
                        )
                        await asyncio.sleep(_CHECK_SECONDS)

    async def end(self) -> None:
        """Wait until no client is being replaced: closing a client while another thread uses it kills the process."""
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait([self._replacing])

    async def _wait_for_other_owners(self, shared: Sequence[int]) -> None:
        """The leader writes the group's offset last. All owners drain at the same time."""
        deadline = time.monotonic() + _OTHER_OWNERS_SECONDS
        while time.monotonic() < deadline and any(
            self._ownership.leads(partition) and self._ownership.others(partition) for partition in shared
        ):
            await asyncio.sleep(0.02)
            self._state.poll()

    async def _replace_client(self, reason: AbortedError) -> None:
        """Continue with a new client if the task still owns its partitions. Raises FencedError, BrokerError.

        A caller that is cancelled leaves it running; the next caller waits for it.
        """
        if self._replacing is None or self._replacing.done():
            self._replacing = asyncio.ensure_future(self._replace_client_once(reason))
            self._replacing.add_done_callback(_retrieve_exception)
        await asyncio.shield(self._replacing)

    async def _replace_client_once(self, reason: AbortedError) -> None:
        log.warning("retrying with a new transactional producer owner=%s reason=%s", self._owner, reason)
        await asyncio.to_thread(self._writer.reconnect)
        ends = await asyncio.to_thread(self._cluster.ends, self._state_topic, self._ownership.partitions)
        deadline = time.monotonic() + _OWNERSHIP_KNOWN_SECONDS
        while not self._state.has_read(ends):
            self._state.poll()
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"could not read topic {self._state_topic!r} to its end within {_OWNERSHIP_KNOWN_SECONDS:g} s: "
                    "who owns the partitions is not known"
                )
            await asyncio.sleep(0.02)
        if self._ownership.lost:
            raise FencedError(f"{self._owner}: another task owns its partitions now")
        self._writer.resume()


def _retrieve_exception(done: asyncio.Future[None]) -> None:
    """Its caller got the exception, or was cancelled: asyncio need not report it as never retrieved."""
    if not done.cancelled():
        done.exception()
