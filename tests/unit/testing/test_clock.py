from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.testing import StuckError, VirtualLoop, run_virtual

YEAR = 365 * 86_400.0


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_year_takes_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(YEAR)
        return now()

    began = time.monotonic()
    assert run_virtual(main()) == YEAR
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("start", [0.0, YEAR, 1.7e9, 1e14])
def test_timers_fire_at_any_clock_time(start: float) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        fired = asyncio.Event()
        loop.call_later(0, fired.set)
        await fired.wait()
        await asyncio.sleep(0.25)
        await asyncio.sleep(1)

    run_virtual(main(), start=start)


def test_clock_begins_with_the_given_time() -> None:
    async def main() -> tuple[float, float]:
        before = now()
        await asyncio.sleep(0.5)
        return before, now()

    assert run_virtual(main(), start=100.0) == (100.0, 100.5)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_sleepers_wake_in_order_and_on_time(delays: list[float]) -> None:
    async def main() -> list[tuple[float, float]]:
        woken: list[tuple[float, float]] = []

        async def sleeper(delay: float) -> None:
            await asyncio.sleep(delay)
            woken.append((delay, now()))

        await asyncio.gather(*(sleeper(delay) for delay in delays))
        return woken

    woken = run_virtual(main())
    assert [delay for delay, _ in woken] == pytest.approx(sorted(delays), abs=1e-8)
    for delay, at in woken:
        assert at == pytest.approx(delay, abs=1e-8)


def test_clock_does_not_move_while_a_callback_is_ready() -> None:
    async def main() -> float:
        asyncio.get_running_loop().call_later(1.0, lambda: None)
        for _ in range(1000):
            await asyncio.sleep(0)
        return now()

    assert run_virtual(main()) == 0.0


def test_timeout_ends_a_longer_call() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return now()

    assert run_virtual(main()) == 30.0


def test_no_timer_fires_while_a_thread_runs() -> None:
    """The clock must not jump to the timer, however long the thread takes."""

    async def main() -> list[str]:
        happened: list[str] = []
        loop = asyncio.get_running_loop()
        loop.call_later(0.001, happened.append, "timer")

        def work() -> None:
            time.sleep(0.05)
            happened.append("thread")

        await asyncio.to_thread(work)
        happened.append(f"{now():g}")
        await asyncio.sleep(1)
        return happened

    assert run_virtual(main()) == ["thread", "0", "timer"]


def test_clock_waits_for_threads_of_another_executor() -> None:
    async def main() -> tuple[list[int], float]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(4) as pool:
            results = await asyncio.gather(*(loop.run_in_executor(pool, abs, -n) for n in range(200)))
        return results, now()

    assert run_virtual(main()) == (list(range(200)), 0.0)


def test_exception_of_a_thread_is_raised() -> None:
    async def main() -> None:
        await asyncio.to_thread(int, "no number")

    with pytest.raises(ValueError, match="no number"):
        run_virtual(main())


def test_clock_waits_for_a_thread_without_a_waiter() -> None:
    async def main() -> bool:
        over = threading.Event()
        started = threading.Event()

        def work() -> None:
            started.set()
            time.sleep(0.05)
            over.set()

        waiter = asyncio.ensure_future(asyncio.to_thread(work))
        await asyncio.sleep(0)
        started.wait()
        waiter.cancel()
        await asyncio.sleep(0.001)
        return over.is_set()

    assert run_virtual(main())


def test_run_waits_for_threads_at_its_end() -> None:
    over = threading.Event()

    async def main() -> None:
        def work() -> None:
            time.sleep(0.05)
            over.set()

        asyncio.ensure_future(asyncio.to_thread(work))  # noqa: RUF006 - left alone on purpose
        await asyncio.sleep(0)

    run_virtual(main())
    assert over.is_set()


async def forever() -> None:
    await asyncio.Event().wait()


async def calls_forever() -> None:
    await forever()


def test_deadlock_error_names_the_waiting_coroutine() -> None:
    async def main() -> None:
        waiting = asyncio.create_task(calls_forever())
        await asyncio.sleep(7)
        await waiting

    with pytest.raises(
        StuckError, match=r"at 7 virtual seconds nothing can continue.*\bforever \(test_clock\.py:\d+"
    ):
        run_virtual(main())


def test_deadlock_error_names_only_some_of_many_tasks() -> None:
    async def main() -> None:
        await asyncio.gather(*(forever() for _ in range(30)))

    with pytest.raises(StuckError, match="and 23 more"):
        run_virtual(main())


def test_foreign_thread_may_wake_the_loop() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()

        def work() -> None:
            time.sleep(0.05)
            loop.call_soon_threadsafe(future.set_result, "woken")

        thread = threading.Thread(target=work)
        thread.start()
        found = await future
        thread.join()
        return found

    assert run_virtual(main()) == "woken"


def test_endless_run_is_stopped_at_its_limit() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110 - nothing to wait for is what it is about
            await asyncio.sleep(1)

    with pytest.raises(StuckError, match=r"at 101 virtual seconds the limit of 100 seconds has passed"):
        run_virtual(main(), limit=100)


def test_cancelled_task_may_sleep_while_it_cleans_up() -> None:
    cleaned: list[float] = []

    async def main() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(5)
            cleaned.append(now())

    with pytest.raises(StuckError):
        run_virtual(main(), limit=100)
    assert cleaned == [5.0]


def test_virtual_loop_runs_callbacks_and_stops() -> None:
    loop = VirtualLoop()
    try:
        seen: list[str] = []
        loop.call_at(2.0, seen.append, "second")
        loop.call_at(1.0, seen.append, "first")
        loop.call_at(3.0, loop.stop)
        loop.run_forever()
        assert (seen, loop.time()) == (["first", "second"], 3.0)
    finally:
        loop.close()
