"""When a task takes a new transactional client, and when it begins again. With a broker: tests/integration."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from keylane.errors import AbortedError, FencedError
from keylane.worker.commit_loop import CommitLoop

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager


class Writer:
    """Its first commit succeeds, and leaves a request that may still arrive."""

    def __init__(self) -> None:
        self.epoch = 0
        self.commits: list[int] = []
        self.failure: AbortedError | None = None
        self.has_records = True
        self.done = asyncio.Event()
        self.room = 1000

    @property
    def failed(self) -> bool:
        return self.failure is not None

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def exclusive(self) -> AbstractAsyncContextManager[None]:
        return asyncio.Lock()

    async def commit(self) -> None:
        if not self.failed:  # as a writer to which nothing was put: what waits is for the next client
            await self.commit_with()

    async def commit_with(self, *_: Any) -> None:
        self.check()
        self.commits.append(self.epoch)
        if len(self.commits) == 3:
            self.done.set()
        if len(self.commits) == 1:
            self.failure = AbortedError("a request got no answer")
        await asyncio.sleep(0.001)

    def reconnect(self) -> None:
        self.epoch += 1

    def resume(self) -> None:
        self.failure = None


def loop_of(writer: Writer, delivery: str, *, lost: bool = False) -> CommitLoop:
    interval = (
        60.0 if delivery == "at_least_once" else 0.005
    )  # records that lanes wait for are committed at once
    app: Any = SimpleNamespace(delivery=delivery, commit_interval=interval, state="app.state")
    session: Any = SimpleNamespace(writer=writer, cluster=SimpleNamespace(ends=lambda *_: {0: 7}))
    state: Any = SimpleNamespace(has_read=lambda _ends: True, poll=lambda: False)
    ownership: Any = SimpleNamespace(partitions=[0], lost=lost)
    return CommitLoop(app, session, state, ownership, "me", pause=lambda: 0.0)


async def three_commits(loop: CommitLoop, writer: Writer) -> None:
    """Return after three commits, or raise what ended the loop before."""
    running = asyncio.ensure_future(loop.run())
    done = asyncio.ensure_future(writer.done.wait())
    await asyncio.wait([running, done], timeout=5, return_when=asyncio.FIRST_COMPLETED)
    for job in (running, done):
        job.cancel()
    await asyncio.wait([running, done])
    if not running.cancelled():
        running.result()


def test_uncertain_commit_is_followed_by_a_new_producer_epoch() -> None:
    writer = Writer()
    asyncio.run(three_commits(loop_of(writer, "at_least_once"), writer))
    assert writer.commits[:3] == [0, 1, 1]


def test_uncertain_commit_makes_an_exactly_once_task_begin_again() -> None:
    writer = Writer()
    with pytest.raises(AbortedError, match="got no answer"):
        asyncio.run(three_commits(loop_of(writer, "exactly_once"), writer))
    assert writer.commits == [0]


def test_uncertain_commit_of_a_replaced_task_is_its_last() -> None:
    writer = Writer()
    with pytest.raises(FencedError):
        asyncio.run(three_commits(loop_of(writer, "at_least_once", lost=True), writer))
    assert writer.commits == [0]
