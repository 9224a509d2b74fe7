"""One run: the app is started, the load begins, the faults strike, everything is waited for and judged."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from campaign.faults import strike
from campaign.finding import Finding, Ruling
from campaign.handle import running
from campaign.judge import Evidence, judge
from campaign.plan import Kind
from campaign.scene import Note, Scene, wait_for
from campaign.watch import Ground, Load, Watch
from campaign.workload import PARTITIONS, Spec, is_poison
from keylane.kafka.transactional_client import TRANSACTION_SECONDS
from keylane.testing import History, read_history

if TYPE_CHECKING:
    from pathlib import Path

    from campaign.fleet import Fleet
    from campaign.plan import Plan, Shot
    from campaign.workload import TaskLine

DONE_SECONDS_MAX = 60.0
"""Seconds after the load and the last fault in which everything has to be done."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """A run, judged. Evidence and scene are there for the timeline."""

    plan: Plan
    delivery: str
    seconds: float
    ruling: Ruling
    folder: Path
    scene: Scene | None = None
    evidence: Evidence | None = None
    tasks: list[TaskLine] = field(default_factory=list)
    ownership: list[Note] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def replay(self) -> str:
        """The command that does it again."""
        patient = " --patient" if self.plan.patient else ""
        return f"python -m campaign --seed {self.plan.seed} --delivery {self.delivery}{patient}"


def run(plan: Plan, delivery: str, fleet: Fleet, *, breaks: str = "") -> Outcome:
    """Never raises for what the app does; a campaign that cannot do its own part makes a bad run, too."""
    began = time.monotonic()
    name = f"c{plan.seed}-{os.urandom(3).hex()}"
    folder = fleet.folder / name
    folder.mkdir(parents=True)
    outcome = Outcome(
        plan=plan, delivery=delivery, seconds=0.0, ruling=Ruling(findings=(), facts={}), folder=folder
    )
    try:
        _run(outcome, name, fleet, breaks)
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        outcome.ruling = Ruling(
            findings=(*outcome.ruling.findings, Finding(rule="campaign", detail=detail)), facts={}
        )
        fleet.reset()
    finally:
        for zombie in outcome.scene.zombies if outcome.scene else ():
            if running(zombie.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(zombie.pid, signal.SIGKILL)
    outcome.seconds = time.monotonic() - began
    outcome.tasks = outcome.scene.spec.tasks() if outcome.scene else []
    if outcome.ruling.ok:
        shutil.rmtree(folder, ignore_errors=True)
    elif outcome.evidence is not None:
        _keep_topics(folder, outcome.evidence)
        if not outcome.evidence.caught_up:
            fleet.reset()  # its tasks may hang endlessly in workers that the next run would get
    return outcome


def _keep_topics(folder: Path, evidence: Evidence) -> None:
    """The content of the topics, beside the history: the broker no longer exists when someone reads the report."""
    topics = {
        "sent": [[*place, key.decode(), number] for place, (key, number) in sorted(evidence.sent.items())],
        "results": [[key.decode(), number] for key, number in evidence.results],
        "letters": list(evidence.letters),
    }
    (folder / "topics.json").write_text(json.dumps(topics))


def _run(outcome: Outcome, name: str, fleet: Fleet, breaks: str) -> None:
    plan = outcome.plan
    clock = time.monotonic()

    def phase(label: str) -> None:
        nonlocal clock
        outcome.phases[label] = time.monotonic() - clock
        clock = time.monotonic()

    station = fleet.station(plan.nodes)
    spec = Spec(
        name=name,
        seed=plan.seed,
        folder=str(outcome.folder),
        bootstrap=station.proxy.bootstrap if plan.proxied else station.broker.bootstrap,
        epoch=plan.epoch,
        delivery=outcome.delivery,
        slow=plan.slow,
        breaks=breaks,
    )
    station.log.create(spec.source, spec.sink, partitions=PARTITIONS)
    driver = fleet.driver(cluster=plan.cluster)
    scene = outcome.scene = Scene(
        plan=plan,
        spec=spec,
        broker=station.broker,
        proxy=station.proxy if plan.proxied else None,
        driver=driver,
        log=station.log,
    )
    driver.on_event = scene.heard
    scene.start_app()
    scene.await_task(0, 90)
    phase("start")
    watch, load = (
        Watch(station.broker.bootstrap, name, spec.source),
        Load(station.broker.bootstrap, spec.source, plan),
    )
    ground = Ground(outcome.folder, scene.note)
    scene.began = time.monotonic_ns()
    scene.note("the load begins")
    watch.start()
    ground.start()
    load.start()
    try:
        _strike_all(scene)
        load.join()
        scene.note("the load has ended")
        if load.failed:
            raise RuntimeError(f"{len(load.failed)} messages could not be sent: {load.failed[0]}")
        phase("load")
        caught_up = _catch_up(scene, watch, load)
        phase("catch up")
        _end_zombies(scene)
        scene.stop_app()
        watch.look()
        phase("stop")
    finally:
        watch.close()
        ground.close()
    outcome.evidence = _collect(outcome, scene, watch, load, caught_up=caught_up)
    outcome.ownership = _ownership(scene)
    outcome.ruling = judge(outcome.evidence)
    phase("judge")
    if outcome.ruling.ok:
        for topic in (spec.source, spec.sink, f"{name}.dlq", f"{name}.state"):
            station.log.delete(topic)
        phase("clean")


def _strike_all(scene: Scene) -> None:
    """All shots, each on a thread of its own, so that they may overlap. Raises what the first that failed raised."""
    problems: list[BaseException] = []

    def shoot(shot: Shot) -> None:
        try:
            strike(scene, shot)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=shoot, args=(shot,), daemon=True) for shot in scene.plan.shots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def _catch_up(scene: Scene, watch: Watch, load: Load) -> bool:
    """Wait until the committed offsets are where the load ended; False when they do not get there."""
    ends: dict[int, int] = {}
    for partition, offset in load.sent:
        ends[partition] = max(ends.get(partition, 0), offset + 1)

    def done() -> bool | None:
        if not scene.driver.alive:
            scene.note("the driver died by itself")
            scene.start_app()
        found = watch.position()
        return all(found.get(partition, 0) >= end for partition, end in ends.items()) or None

    try:
        return wait_for(done, DONE_SECONDS_MAX, "everything is done")
    except TimeoutError:
        scene.note(
            f"gave up waiting: committed {watch.position()}, the source ends at {ends}; see the stacks"
        )
        for line in scene.live_tasks():
            _show_stacks(line.pid)
        return False


def _show_stacks(pid: int) -> None:
    """Into the file ``stacks-…`` of the run's folder."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)


def _end_zombies(scene: Scene) -> None:
    """Let those that are awake do their worst for a while: the app's stop reaches only those of its own run."""
    awake = [zombie for zombie in scene.zombies if zombie.woken]
    until = max((zombie.woken / 1e9 + 3.0 for zombie in awake), default=0.0)
    while time.monotonic() < until and any(running(zombie.pid) for zombie in awake):
        time.sleep(0.05)
    for zombie in awake:
        if alive := running(zombie.pid):
            _show_stacks(zombie.pid)
        scene.note(f"zombie {zombie.pid} {'still runs: see its stacks' if alive else 'has ended'}")


def _ownership(scene: Scene) -> list[Note]:
    """Who said when that it owns what: records of the state topic, as far as compaction has left them."""
    wall = time.time_ns() - time.monotonic_ns()
    return [
        Note(
            row.timestamp * 1_000_000 - wall,
            f"state of {row.partition}: {row.key!r} {'is let go of' if row.value is None else row.value!r}",
        )
        for row in scene.log.read(f"{scene.spec.name}.state")
        if row.key is not None and row.key.startswith((b"owner", b"run"))
    ]


def _await_transactions(scene: Scene) -> float:
    """Wait until no transaction is open among results and letters: records behind one are not readable before.

    The app has ended by then, so its own transaction ends at once; one that was not fenced lasts until it times out.
    """
    cluster, began = scene.log.cluster, time.monotonic()
    topics = {
        topic: range(cluster.partitions(topic)) for topic in (scene.spec.sink, f"{scene.spec.name}.dlq")
    }

    def none() -> bool | None:
        return (
            all(cluster.ends(t, ps) == cluster.ends(t, ps, committed=True) for t, ps in topics.items())
            or None
        )

    with contextlib.suppress(TimeoutError):
        wait_for(none, TRANSACTION_SECONDS + 20, "all transactions end")
    return time.monotonic() - began


def _collect(outcome: Outcome, scene: Scene, watch: Watch, load: Load, *, caught_up: bool) -> Evidence:
    spec, plan = scene.spec, scene.plan
    left_open = _await_transactions(scene)
    results = [(row.key or b"", int(row.value or b"-1")) for row in scene.log.read(spec.sink)]
    letters = [
        (int(row.header("keylane-partition") or b"-1"), int(row.header("keylane-offset") or b"-1"))
        for row in scene.log.read(f"{spec.name}.dlq")
    ]
    history = read_history(spec.history) if spec.history.is_dir() else History(events=())
    return Evidence(
        delivery=outcome.delivery,
        sent=dict(load.sent),
        poison=frozenset(number for number in range(plan.messages) if is_poison(plan.seed, number)),
        history=history,
        samples=list(watch.samples),
        results=results,
        letters=letters,
        zombies={zombie.owner: zombie.stopped for zombie in scene.zombies},
        forgotten=scene.forgotten,
        outages=scene.outages,
        left_open=left_open,
        caught_up=caught_up,
        peaceful=plan.kinds <= {Kind.RESTART},
    )
