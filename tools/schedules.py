"""Random schedules of failures and faults in virtual time, by seed; judged by order, loss and duplicates.

A seed decides everything: the app's policy, delivery, breaker and limits, what is sent twice, what fails when and how,
how long the broker takes for what, when tasks crash, drain, or share partitions out otherwise, when the source topic is
deleted and created again (in one of ten), and what operators do about it, sensible or not. The cause of the poison is
fixed after a while; in the end everything is released and redriven, so that every message comes through, but for those
that went with their topic.

    python -m schedules --seeds 20000 --processes 2     many of them, with progress and the seeds that failed
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import multiprocessing
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane import (
    App,
    Breaker,
    FailureGuard,
    Idempotency,
    Message,
    Poison,
    Rate,
    Result,
    Retry,
    State,
    Timers,
    Transient,
    VersionOrdering,
)
from keylane.testing import (
    Crash,
    Drain,
    EventKind,
    Fault,
    Flaw,
    Harness,
    Hold,
    Pause,
    Recreate,
    Recut,
    Redrive,
    Refuse,
    Reject,
    Release,
    ResultsVerdict,
    RunResult,
    Skip,
    Verdict,
    check_results,
)

if TYPE_CHECKING:
    from keylane.policies.failure_policy import OnFailure
    from keylane.spec import DeliveryMode

POLICIES: tuple[OnFailure, ...] = ("skip", "block", "block_and_dlq", "park")
DELIVERIES: tuple[DeliveryMode, ...] = ("at_least_once", "exactly_once")
SENT_SECONDS = 5.0
MENDED_SECONDS = 3.0
RELAPSE_SECONDS = 1.5
"""So long the poison is back when the source is created again."""
CLEARED_SECONDS = 13.0
"""Letters that could not be written are tried again after 5 s: then all of them are there."""
MESSAGES = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a seed has drawn for the whole of its run."""

    seed: int
    storm: bool
    """Results are slow, much fails, tasks crash, and operators redrive what they can just then."""
    policy: OnFailure
    delivery: DeliveryMode
    keys: int
    partitions: int
    latency: tuple[float, float]
    letters: tuple[float, float]
    commits: tuple[float, float]
    reading: tuple[float, float]
    twice: float
    versions: bool
    breaks: tuple[Crash | Drain | Recut, ...]
    recreates: tuple[Recreate, ...]

    @classmethod
    def of(cls, rng: random.Random, seed: int) -> Shape:
        """Drawn one after another, the same for the same seed."""
        breaks: list[Crash | Drain | Recut] = []
        storm, recut = rng.random() < 0.3, rng.random() < 0.3
        for _ in range(rng.randrange(storm, 5)):
            at = rng.random() * (CLEARED_SECONDS if rng.random() < 0.3 else SENT_SECONDS)
            what = rng.random()
            if recut and what < 0.6:
                breaks.append(Recut(at=at, tasks=rng.randint(1, 2)))
            elif storm or what < 0.75:
                breaks.append(Crash(at=at))
            else:
                breaks.append(Drain(at=at))
        versions = rng.random() < 0.15  # one that is sent twice would be missing
        return cls(
            seed=seed,
            storm=storm,
            policy=rng.choice(("skip", "park") if storm else POLICIES),
            delivery=rng.choice(DELIVERIES),
            keys=rng.choice((2, 6) if storm else (2, 6, 25)),
            partitions=rng.randint(1, 3),
            latency=rng.choice(
                ((0.0, 0.5), (0.0, 3.0)) if storm else ((0.001, 0.03), (0.0, 0.5), (0.0, 3.0))
            ),
            letters=rng.choice(((0.001, 0.03), (0.0, 0.5))),
            commits=rng.choice(((0.0, 0.01), (0.0, 0.3))),
            reading=rng.choice(((0.0, 0.0), (0.0, 0.05), (0.0, 0.5))),
            twice=0.0 if versions else rng.choice((0.0, 0.1, 0.4)),
            versions=versions,
            breaks=tuple(breaks),
            recreates=recreates_of(seed),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """How the messages of a run flow. Drawn apart, so that a seed's other draws stay as they were."""

    several: bool
    """Each message has a second result, with another key and in another topic."""
    batches: int
    """The stage takes batches of one lane, of at most so many; 0: two stages of single messages."""
    rate: Rate | None
    per_key: Rate | None
    holds: tuple[Hold, ...]

    @classmethod
    def of(cls, shape: Shape) -> Flow:
        rng = random.Random(f"flow {shape.seed}")
        batches = rng.random() < 0.2 and not shape.versions
        holds = []
        if rng.random() < 0.3:
            for _ in range(rng.randint(1, 2)):
                what: tuple[str | None, Any] = rng.choice(
                    (
                        (None, None),
                        ("partition", rng.randrange(shape.partitions)),
                        ("stage", "work" if batches else rng.choice(("first", "downstream"))),
                        ("key", b"k%d" % rng.randrange(shape.keys)),
                    )
                )
                chosen: dict[str, Any] = {} if what[0] is None else {what[0]: what[1]}
                holds.append(Hold(at=rng.random() * SENT_SECONDS, for_=rng.random() * 2, **chosen))
        return cls(
            several=rng.random() < 0.3,
            batches=rng.choice((2, 5, 64)) if batches else 0,
            rate=Rate(rng.choice((20, 100))) if rng.random() < 0.2 else None,
            per_key=Rate(rng.choice((5, 20))) if rng.random() < 0.2 else None,
            holds=tuple(holds),
        )


def recreates_of(seed: int) -> tuple[Recreate, ...]:
    """When the source is created again, if at all. Drawn apart, so that a seed's other draws stay as they were."""
    rng = random.Random(f"recreate {seed}")
    if rng.random() >= 0.1:
        return ()
    last = CLEARED_SECONDS if rng.random() < 0.2 else SENT_SECONDS
    times = [rng.uniform(0.1, last) for _ in range(1 if rng.random() < 0.8 else 2)]
    return tuple(Recreate(at=at) for at in sorted(times))


def stateful(seed: int) -> bool:
    """Whether the app keeps a state. Drawn apart, like the above."""
    return random.Random(f"state {seed}").random() < 0.4


def timed(seed: int) -> bool:
    """Whether its stages set timers, too."""
    return random.Random(f"timers {seed}").random() < 0.5


def make_app(rng: random.Random, shape: Shape, flow: Flow) -> App:
    """The app of a run: stages that fail by chance, the same for the same seed."""
    sick = rng.choice((0.1, 0.2) if shape.storm else (0.0, 0.03, 0.1, 0.2))
    flaky = rng.random() * 0.2
    outage = rng.uniform(0, SENT_SECONDS)
    outage_ends = outage + rng.choice([0, 0, 0.5, 2])
    app = App(
        "schedule",
        source="in",
        sinks=("out", "more"),
        on_failure=shape.policy,
        delivery=shape.delivery,
        # Long enough for any outage that the breaker does not handle: an outage must not make dead letters.
        retry=Retry(attempts=rng.choice([6, 12]), wait_initial=0.1, wait_max=rng.choice([0.5, 2.0])),
        commit_interval=rng.choice([0.05, 0.2, 1.0]),
        drain_timeout=rng.choice([0.05, 0.5, 5.0]),
        # Lanes that wait too long for a version stop, and a task that is full of blocked lanes reads nothing more.
        max_buffered=65_536 if shape.versions else rng.choice([8, 64, 65_536]),
        failure_guard=FailureGuard(consecutive=10_000, minimum=10_000),
        versions=VersionOrdering(wait=rng.choice((0.3, 100.0)), on_timeout="fail")
        if shape.versions
        else None,
        idempotency=rng.choice([Idempotency(), Idempotency(count=30), Idempotency(count=100, age=2.0), None]),
    )

    def chance(msg: Message, what: int) -> float:
        return (hash((shape.seed, what, msg.partition, msg.offset)) >> 8 & 0xFFFFFF) / 0x1000000

    mood = rng.randrange(3)

    def broken(now: float) -> bool:
        return now < MENDED_SECONDS or any(0 <= now - each.at < RELAPSE_SECONDS for each in shape.recreates)

    def results(msg: Message) -> Any:
        if not flow.several:
            return bytes(msg.value)
        return [Result(msg.value), Result(msg.value, key=b"more " + (msg.key or b""), topic="more")]

    breaker = rng.choice([None, Breaker(minimum=5, window=2, open_for=0.5, probes=2)])
    timeout, limit = rng.choice([None, 0.04]), rng.choice([None, 3])
    limits: Any = {"rate": flow.rate, "per_key": flow.per_key, "max_concurrency": limit}

    if flow.batches:

        @app.batch_stage(of="lane", max_size=flow.batches, breaker=breaker, **limits)
        async def work(msgs: list[Message]) -> list[Any]:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(0.01 + chance(msgs[0], 1) * 0.05)
            if outage <= now < outage_ends:
                raise ConnectionError("down")
            return [
                Poison("not fixed yet")
                if chance(msg, 2) < sick and broken(now)
                else Transient("try again")
                if msg.attempt == 1 and chance(msg, 3) < flaky
                else results(msg)
                for msg in msgs
            ]

        return app

    if stateful(shape.seed):

        @app.stage
        async def remember(msg: Message, seen: State[list[int]], count: State[int], timers: Timers) -> bytes:
            seen.value.append(int(msg.value))
            count.value += 1
            if timed(shape.seed):
                timers.set("echo", after=chance(msg, 6) * 0.5, value=int(msg.value))
            if chance(msg, 5) < 0.03 and msg.attempt == 1:
                raise Transient("after the change")
            return bytes(msg.value)

        @app.on_timer("echo")
        async def echo(msg: Message, fired: State[list[int]]) -> None:
            await asyncio.sleep(chance(msg, 7) * 0.05)
            fired.value.append(msg.value)
            if msg.attempt == 1 and chance(msg, 8) < 0.1:
                raise Transient("again")

    @app.stage
    async def first(msg: Message) -> bytes:
        await asyncio.sleep(chance(msg, 1) * 0.05)
        if chance(msg, 2) < sick and broken(asyncio.get_running_loop().time()):
            raise Poison("not fixed yet")
        if msg.attempt == 1 and chance(msg, 3) < flaky:
            raise (Transient("try again"), TimeoutError(), Transient("later", retry_after=0.3))[mood]
        return bytes(msg.value)

    @app.stage(breaker=breaker, timeout=timeout, **limits)
    async def downstream(msg: Message) -> Any:
        now = asyncio.get_running_loop().time()
        # The longest ones are cut off by a time-out, if there is one, in their first attempts.
        slow = 0.06 if msg.attempt < 3 and chance(msg, 4) < 0.05 else 0.01
        await asyncio.sleep(slow)
        if outage <= now < outage_ends:
            raise ConnectionError("down")
        return results(msg)

    return app


def make_faults(rng: random.Random, shape: Shape) -> list[Fault]:
    """What befalls the run, and what operators order."""
    faults: list[Fault] = [*shape.breaks, *shape.recreates]
    if rng.random() < 0.3:
        faults.append(Pause(at=rng.random() * SENT_SECONDS, for_=rng.random()))
    if rng.random() < 0.3:
        faults.append(Refuse(at=rng.random() * SENT_SECONDS, for_=rng.random() * 2))
    if rng.random() < 0.3:
        chance = rng.choice((0.02, 0.2))
        faults.append(Reject(at=rng.random() * SENT_SECONDS, for_=rng.random() * 2, chance=chance))
    careless = 1.0 if shape.storm else rng.choice((0.0, 0.3, 0.9))  # operators who do not know better
    # Not where a restart meets a redrive of a parked lane: what had attempts before is not held back then.
    redrives = True
    for number in range(shape.keys):
        key = b"k%d" % number
        if rng.random() < careless and redrives:
            at = rng.uniform(0.2, SENT_SECONDS + 2)
            if shape.breaks and rng.random() < (
                0.8 if shape.storm else 0.4
            ):  # right after a restart, or while no task runs
                at = max(0.0, rng.choice(shape.breaks).at + rng.uniform(-0.2, 0.2))
            faults.append(Redrive(at=at, key=key))
            while rng.random() < 0.4:
                at += rng.random() * 0.6
                faults.append(Redrive(at=at, key=key))
        if rng.random() < careless / 4:
            faults.append(Release(at=rng.uniform(0.5, SENT_SECONDS), key=key))
        if rng.random() < careless / 4:
            faults.append(Skip(at=rng.uniform(0.5, SENT_SECONDS), key=key))
        for again in range(3 if shape.versions else 1):  # a message that waited too long stops its lane again
            at = CLEARED_SECONDS + 20 * again
            faults += [Release(at=at, key=key), Redrive(at=at + 1, key=key)]
    return faults


def run(seed: int) -> Counter[str]:
    """Run one and judge it; returns its interesting features. Raises AssertionError or another error if it is wrong."""
    rng = random.Random(seed)
    shape = Shape.of(rng, seed)
    flow = Flow.of(shape)
    harness = Harness(
        make_app(rng, shape, flow),
        partitions=shape.partitions,
        seed=seed,
        faults=[*make_faults(rng, shape), *flow.holds],
        latency=shape.latency,
        letters=shape.letters,
        commits=shape.commits,
        reading=shape.reading,
        holes=rng.random() * 0.2,
        limit=600,
    )
    sent: list[tuple[bytes, bytes]] = []
    for number in range(MESSAGES):
        again = bool(sent) and rng.random() < shape.twice
        key, name = rng.choice(sent[-50:]) if again else (b"k%d" % rng.randrange(shape.keys), b"%d" % number)
        sent.append((key, name))
    versions = versions_of(rng, [key for key, _ in sent])
    times = [number * SENT_SECONDS / MESSAGES for number in range(MESSAGES)]
    if shape.recreates:
        topics = [sum(each.at <= at for each in shape.recreates) for at in times]
        versions = renumbered(versions, [(topic, key) for topic, (key, _) in zip(topics, sent, strict=True)])
    for number, (key, name) in enumerate(sent):
        at = times[number]
        headers = [("event-id", name)]
        if shape.versions:
            headers.append(("event-version", b"%d" % versions[number]))
        harness.send(key=key, value=b"%d" % number, headers=headers, at=at)
    result = harness.run()
    judge(harness, result, shape, flow)
    facts: Counter[str] = Counter(dict.fromkeys((shape.policy, shape.delivery, "runs"), 1))
    facts["epochs"] = result.epochs
    facts["recreated sources"] = len(shape.recreates)
    facts["gone messages"] = len(result.gone)
    facts["runs with several results"] = flow.several
    facts["runs with batches of a lane"] = bool(flow.batches)
    facts["runs with rates"] = bool(flow.rate or flow.per_key)
    facts["pauses"] = len(flow.holds)
    facts["with state"] = stateful(seed) and not flow.batches
    facts["with timers"] = facts["with state"] and timed(seed)
    facts["recuts"] = sum(isinstance(each, Recut) for each in shape.breaks)
    for dead in result.dead:
        facts[f"{dead.kind} letters"] += 1
        facts["letters redriven and dead again"] += dead.redrives > 0
    facts["duplicates"] = len(result.duplicates)
    facts["attempts"] = result.verdict.counts.attempts
    facts["repeats"] = result.verdict.repeats
    return facts


def versions_of(rng: random.Random, keys: list[bytes]) -> list[int]:
    """Ascending for each key, but for neighbours that have changed places."""
    found, places = [], dict[bytes, list[int]]()
    for number, key in enumerate(keys):
        places.setdefault(key, []).append(number)
        found.append(len(places[key]))
    for of_key in places.values():
        for one, other in itertools.pairwise(of_key):
            if rng.random() < 0.1:
                found[one], found[other] = found[other], found[one]
    return found


def renumbered(versions: list[int], entities: list[tuple[int, bytes]]) -> list[int]:
    """The same order of versions in each entity of a topic, from 1 on."""
    places: dict[tuple[int, bytes], list[int]] = {}
    for number, entity in enumerate(entities):
        places.setdefault(entity, []).append(number)
    found = [0] * len(versions)
    for of_entity in places.values():
        for version, number in enumerate(sorted(of_entity, key=versions.__getitem__), 1):
            found[number] = version
    return found


def judge(harness: Harness, result: RunResult, shape: Shape, flow: Flow) -> None:
    """Every promise that the run's app makes. Raises AssertionError."""
    messages = harness.messages()
    first = shape.partitions * len(shape.recreates)
    at = {place: record.value() for place, record in messages.items()}
    # An event is one of its topic: what came through in an earlier topic says nothing about this one.
    names = {
        record.value(): (place[0] // shape.partitions, dict(record.headers() or ())["event-id"])
        for place, record in messages.items()
    }
    # So is the order of a key: a result of the old topic that was on its way may come after one of the new topic.
    keys = {
        record.value(): b"%d/%s" % (names[record.value()][0], record.key()) for record in messages.values()
    }
    inputs = [(key, value) for value, key in keys.items()]
    outputs = [(keys[record.value()], record.value()) for record in harness.log.records("out")]
    late = {at[dead.partition, dead.offset] for dead in result.dead if dead.kind == "dead"}
    if not shape.versions or not late:  # a dead letter's version is one that its lane has gone beyond
        raise_if_bad(result.verdict, shape)
    if shape.versions:  # a message that waited too long for its version may be in a stopped lane
        return
    waiting = [place for place in result.waiting if place[0] >= first]
    assert not waiting, f"everything was released and redriven; these still wait: {waiting}"
    started = {(event.partition, event.offset) for event in result.history if event.kind is EventKind.START}
    for dead in result.dead:
        assert dead.park is None or (dead.partition, dead.park) in started, (
            f"parked without a failure: {dead}"
        )
    letters = {
        (dead.partition, dead.offset)
        for dead in result.dead
        if dead.partition < first and dead.kind != "archived"
    }
    former = {names[at[place]] for place in letters.union(result.gone)}  # nobody redrives these
    got = {value for _, value in outputs}
    through = {names[value] for value in got}
    missing = set(names.values()) - through - former
    assert not missing, f"the cause is fixed, but these did not come through: {missing}"
    passed_over = {at[place] for place in result.duplicates}
    passed_over.update(value for value, name in names.items() if name in former)
    found = [outputs]
    if flow.several:  # the second results are in the order of their keys, too
        found.append([(keys[record.value()], record.value()) for record in harness.log.records("more")])
    for written in found:
        there = {value for _, value in written}
        results = check_results(
            [(key, value) for key, value in inputs if value in there or value not in passed_over],
            written,
            allow_duplicates=shape.delivery == "at_least_once",
            late=late,
        )
        raise_if_bad(results, shape)
    if stateful(shape.seed) and not flow.batches:  # batches of one lane take no state
        judge_states(harness, result, shape, outputs, late)


def judge_states(
    harness: Harness,
    result: RunResult,
    shape: Shape,
    outputs: list[tuple[bytes, bytes | None]],
    late: set[bytes | None],
) -> None:
    """The state of every key is the fold of its messages: each that came through once, in the order of the log.

    A message that was a dead letter first comes later. Only the last topic counts: a new source begins without state.
    """
    topic = len(shape.recreates)
    sent: dict[bytes, list[int]] = {}
    for place, record in harness.messages().items():
        if place[0] >= shape.partitions * topic:
            sent.setdefault(record.key() or b"", []).append(int(record.value() or b""))
    written: dict[bytes, list[int]] = {}
    for key, value in outputs:
        if key.startswith(b"%d/" % topic):
            written.setdefault(key.partition(b"/")[2], []).append(int(value or b""))
    assert set(result.states) <= set(sent), "a state of a key that was never sent"
    for key, numbers in sent.items():
        seen: list[int] = result.states.get(key, {}).get("seen", [])
        assert result.states.get(key, {}).get("count", 0) == len(seen), (
            f"states of {key!r} disagree: {result.states[key]}"
        )
        twice = {number for number in seen if seen.count(number) > 1}
        if shape.delivery == "at_least_once":  # a crash may leave a letter of what comes through then
            twice = {number for number in twice if b"%d" % number not in late}
        assert not twice, f"a message of {key!r} changed its state twice: {twice} in {seen}"
        got = set(written.get(key, []))
        assert set(seen) == got, (
            f"state of {key!r}: misses {got - set(seen)}, has {set(seen) - got} in addition"
        )
        in_order = [number for number in seen if b"%d" % number not in late]
        assert in_order == [n for n in numbers if n in set(in_order)], (
            f"state of {key!r} is out of order: {seen}"
        )
        if timed(shape.seed):
            fired: list[int] = result.states.get(key, {}).get("fired", [])
            again = {number for number in fired if fired.count(number) > seen.count(number)}
            assert not again, f"timers of {key!r} fired too often: {again} in {fired}, set by {seen}"
            assert fired[-1:] == seen[-1:], f"the last timer of {key!r} did not fire: {fired}, set by {seen}"
        if shape.delivery == "exactly_once":
            assert seen == written.get(key, []), f"state and results of {key!r} disagree: {seen}"


def raise_if_bad(verdict: Verdict | ResultsVerdict, shape: Shape) -> None:
    """Raises AssertionError. A run whose messages nearly all went with their topic proves little: that is no fault."""
    if not shape.recreates or set(verdict.tally) != {Flaw.THIN}:
        verdict.raise_if_bad()


def problem_of(seed: int) -> tuple[int, str, Counter[str]]:
    """The seed, the problem of its run if any, and its features."""
    try:
        return seed, "", run(seed)
    except Exception as error:
        return seed, f"{type(error).__name__}: {error}", Counter()


def main(given: list[str] | None = None) -> int:
    """Run the seeds that were asked for; 1 when any was bad."""
    parser = argparse.ArgumentParser(prog="python -m schedules", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many (1000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--processes", type=int, default=2, help="that share them (2)")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many")
    args = parser.parse_args(given)
    logging.getLogger("keylane").setLevel(logging.CRITICAL)
    began = told = time.monotonic()
    bad: list[int] = []
    facts: Counter[str] = Counter()
    done = 0
    with multiprocessing.get_context("fork").Pool(args.processes) as pool:
        seeds = range(args.first, args.first + args.seeds)
        for seed, problem, had in pool.imap_unordered(problem_of, seeds, chunksize=10):
            done += 1
            facts += had
            if problem:
                bad.append(seed)
                print(f"seed {seed}: {problem}", flush=True)
            now = time.monotonic()
            if now - told > 10:
                told = now
                print(f"{done} of {args.seeds} seeds, {len(bad)} bad, {now - began:.0f} s", flush=True)
            if now - began > args.minutes * 60:
                break
    each = (time.monotonic() - began) * args.processes / max(1, done)
    print(
        f"{done} seeds from {args.first} on: {done - len(bad)} clean, {len(bad)} bad; {each * 1000:.1f} ms each"
    )
    print(", ".join(f"{count:,} {name}" for name, count in sorted(facts.items())))
    if bad:
        print("bad seeds:", *sorted(bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
