"""Random schedules of failures and faults in virtual time, by seed: 20 of them in every run, `make soak` for more.

A seed decides everything: the app's policy, breaker and limits, what is sent twice, what fails when and how, when the
task crashes, drains or its broker stalls, when letters are refused, and what an operator does about it. The cause of
the poison is mended after 20 seconds; then an operator releases and redrives. Replay one with `make replay SEED=7`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from typing import TYPE_CHECKING

import pytest

from keylane import App, Breaker, FloodGuard, Idempotency, Message, Poison, Retry, Transient
from keylane.testing import (
    Crash,
    Drain,
    Fault,
    Flaw,
    Harness,
    Pause,
    Redrive,
    Refuse,
    Release,
    Skip,
    check_results,
)

if TYPE_CHECKING:
    from keylane.app import OnFailure

SEEDS = range(int(os.environ.get("KEYLANE_SEEDS", "20")))
ONE = os.environ.get("KEYLANE_SEED")
POLICIES: tuple[OnFailure, ...] = ("skip", "block", "block_and_dlq", "park")
MENDED = 20.0
MESSAGES = 400


def make_app(rng: random.Random, policy: OnFailure) -> App:
    sick = rng.random() * 0.04
    flaky = rng.random() * 0.2
    outage = rng.uniform(0, 15)
    outage_ends = outage + rng.choice([0, 0, 1, 4])
    seed = rng.random()
    app = App(
        "schedule",
        source="in",
        sink="out",
        on_failure=policy,
        # Long enough for any outage that is not the breaker's business: an outage is no reason for dead letters.
        retry=Retry(attempts=rng.choice([6, 12]), wait_initial=0.1, wait_max=rng.choice([0.5, 2.0])),
        commit_interval=rng.choice([0.05, 0.2, 1.0]),
        drain_timeout=rng.choice([0.2, 2.0, 30.0]),
        capacity=rng.choice([8, 64, 65_536]),
        flood=FloodGuard(consecutive=10_000, minimum=10_000),
        idempotency=rng.choice([Idempotency(), Idempotency(count=30), Idempotency(count=100, age=2.0), None]),
    )

    def chance(msg: Message, what: str) -> float:
        return random.Random(f"{seed} {what} {msg.partition} {msg.offset}").random()

    @app.stage
    async def first(msg: Message) -> bytes:
        await asyncio.sleep(chance(msg, "time") * 0.05)
        if chance(msg, "poison") < sick and asyncio.get_running_loop().time() < MENDED:
            raise Poison("not yet mended")
        if msg.attempt == 1 and chance(msg, "flaky") < flaky:
            raise rng.choice([Transient("try again"), TimeoutError(), Transient("later", retry_after=0.3)])
        return bytes(msg.value)

    breaker = rng.choice([None, Breaker(minimum=5, window=2, open_for=0.5, probes=2)])

    @app.stage(breaker=breaker, timeout=rng.choice([None, 0.04]), limit=rng.choice([None, 3]))
    async def downstream(msg: Message) -> bytes:
        now = asyncio.get_running_loop().time()
        # The longest ones are cut off by a time-out, if there is one, in their first attempts.
        slow = 0.06 if msg.attempt < 3 and chance(msg, "slow") < 0.05 else 0.01
        await asyncio.sleep(slow)
        if outage <= now < outage_ends:
            raise ConnectionError("down")
        return bytes(msg.value)

    return app


def make_faults(rng: random.Random, keys: int) -> list[Fault]:
    faults: list[Fault] = [Pause(at=rng.random() * 10, for_=rng.random())]
    for _ in range(rng.randrange(4)):
        at = rng.random() * 30
        faults.append(Crash(at=at) if rng.random() < 0.5 else Drain(at=at))
    if rng.random() < 0.3:
        faults.append(Refuse(at=rng.random() * 10, for_=rng.random() * 8))
    for number in range(keys):
        key = b"k%d" % number
        if rng.random() < 0.1:  # an operator who does not know better
            redrive = Redrive(at=rng.uniform(5, 20), key=key)
            faults.append(redrive if rng.random() < 0.5 else Release(at=10, key=key))
        if rng.random() < 0.05:
            faults.append(Skip(at=rng.uniform(5, 15), key=key))
        faults += [Release(at=MENDED + 20, key=key), Redrive(at=MENDED + 21, key=key)]
    return faults


@pytest.mark.parametrize("seed", SEEDS if ONE is None else [int(ONE)])
def test_any_schedule_of_failures_keeps_the_order_and_loses_nothing(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL if ONE is None else logging.INFO, "keylane")
    rng = random.Random(seed)
    policy: OnFailure = rng.choice(POLICIES)
    keys = rng.choice([3, 20, 100])
    run = Harness(
        make_app(rng, policy),
        partitions=rng.randrange(1, 5),
        seed=seed,
        faults=make_faults(rng, keys),
        latency=(0.001, 0.03),
        holes=rng.random() * 0.2,
    )
    twice = rng.choice([0.0, 0.1, 0.5])
    sent: list[tuple[bytes, bytes]] = []
    for number in range(MESSAGES):
        again = bool(sent) and rng.random() < twice
        key, value = rng.choice(sent[-50:]) if again else (b"k%d" % rng.randrange(keys), b"%d" % number)
        sent.append((key, value))
        run.send(key=key, value=value, headers=[("event-id", value)], at=number * 0.04)
    result = run.run()
    assert Flaw.DUPLICATE not in result.verdict.tally, str(result.verdict)
    dead = {(letter.partition, letter.offset) for letter in result.dead if letter.kind == "dead"}
    inputs = [(r.key(), r.value()) for r in run.log.records("in")]
    outputs = [(r.key(), r.value()) for r in run.log.records("out")]
    assert {value for _, value in outputs} == {value for _, value in inputs}, (
        "the cause is mended: all are through"
    )
    if not dead:  # a dead letter that is redriven comes after what its lane did without it
        result.verdict.raise_if_bad()
        check_results(inputs, outputs, allow_duplicates=True).raise_if_bad()
    else:
        late = {r.value() for r in run.log.records("in") if (r.partition(), r.offset()) in dead}
        check_results(
            [(key, value) for key, value in inputs if value not in late],
            [(key, value) for key, value in outputs if value not in late],
            allow_duplicates=True,
        ).raise_if_bad()
