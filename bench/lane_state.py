"""Processor time of lane state: a no-op stage with and without a state of 200 bytes, in the engine alone.

    python -m bench.lane_state --messages 200000

Kafka is left out: what it adds is the same for both, but for one record for each changed key and commit.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import uvloop

from keylane import App, Message, State
from keylane.dataframe.task import FrameOutput
from keylane.engine.engine import Engine
from keylane.engine.garbage import own_collector
from keylane.engine.lane_state import MemoryValues
from keylane.engine.stages import open_pipeline
from keylane.message import PlainRecord

if TYPE_CHECKING:
    from collections.abc import Callable

_BATCH = 2_000
_COMMIT_MESSAGES = 20_000


@dataclass(frozen=True)
class Profile:
    """About 200 bytes of JSON."""

    name: str = "a customer with a name of usual length"
    city: str = "a city in a country"
    address: str = "a street with a number, on the second floor, behind the yard"
    count: int = 0
    total: float = 0.5


def plain() -> App:
    """Without state."""
    app = App("plain", source="in")

    @app.stage
    async def work(msg: Message) -> None:
        del msg

    return app


def stateful(kind: Any) -> Callable[[], App]:
    """With a state that each message reads and writes."""

    def made() -> App:
        app = App("stateful", source="in")

        async def work(msg: Message, profile: State[Any]) -> None:
            del msg
            found: Any = profile.value
            if isinstance(found, dict):
                profile.value = {**found, "count": found.get("count", 0) + 1, "text": "x" * 170}
            elif found is None:
                profile.value = {"count": 1, "text": "x" * 170}
            else:
                profile.value = replace(found, count=found.count + 1)

        work.__annotations__["profile"] = State[kind]
        app.stage(work)
        return app

    return made


async def drain(app: App, messages: int, keys: int) -> float:
    """Messages per second of processor time."""
    records = [
        PlainRecord(topic="in", partition=0, offset=n, key=b"key-%d" % (n * 7919 % keys), value=b"x")
        for n in range(messages)
    ]
    done = 0
    committed = 0

    def on_done(deliveries: list[Any]) -> None:
        nonlocal done, committed
        done += len(deliveries)
        if engine.states is not None and done - committed >= _COMMIT_MESSAGES:
            committed = done
            engine.states.written(engine.states.changed())

    async with open_pipeline(app.spec) as steps:
        engine = Engine(app.spec, steps, FrameOutput(), on_done=on_done, values=MemoryValues())
        began = time.process_time()
        for at in range(0, messages, _BATCH):
            engine.accept(records[at : at + _BATCH])
            while engine.held > _BATCH:  # noqa: ASYNC110 - it yields to the runners
                await asyncio.sleep(0)
        await engine.finish()
        seconds = time.process_time() - began
        await engine.abort()
    return messages / seconds


def main() -> int:
    """Measure in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--keys", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    apps: dict[str, Callable[[], App]] = {
        "without state": plain,
        "State[dataclass]": stateful(Profile),
        "State[dict]": stateful(dict[str, Any]),
        "State[Any]": stateful(Any),
    }
    rates: dict[str, list[float]] = {name: [] for name in apps}
    for _ in range(args.rounds):
        for name, made in apps.items():
            with own_collector(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                rates[name].append(runner.run(drain(made(), args.messages, args.keys)))
    base = statistics.median(rates["without state"])
    for name, found in rates.items():
        rate = statistics.median(found)
        print(
            f"{name:20} {rate:>10,.0f}/s  {1e6 / rate:5.2f} us  {rate / base:5.0%}  +{1e6 / rate - 1e6 / base:.2f} us"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
