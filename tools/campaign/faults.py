"""The faults, carried out: each waits for its moment, strikes, and repairs what it must repair itself."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from typing import TYPE_CHECKING

from campaign.handle import children, command_of, name_of, parent, running, stopped
from campaign.plan import Kind
from campaign.proxy import Cut, Weather
from campaign.scene import Zombie, wait_for
from keylane.broker.errors import PortTakenError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from campaign.plan import Shot
    from campaign.scene import Scene
    from campaign.workload import TaskLine
    from keylane.broker.node import Node


CONTINUES_SECONDS_MAX = 12.0
"""After a driver's death, from the start of the next run until its first message runs: lanes that nobody serves end
after 10 s."""


def strike(scene: Scene, shot: Shot) -> None:
    """Wait for the moment of this shot and do it. Whatever goes wrong is noted, and raised."""
    _await_moment(scene, shot)
    try:
        _DOING[shot.kind.plain](scene, shot)
    except Exception as error:
        scene.note(f"fault {shot.kind.label} failed: {type(error).__name__}: {error}")
        raise


def _await_moment(scene: Scene, shot: Shot) -> None:
    if not shot.kind.at_edge:
        time.sleep(max(0.0, scene.began / 1e9 + shot.at - time.monotonic()))
        return
    # The epoch that runs a second after the load began: it ends a fixed time after it began.
    time.sleep(max(0.0, scene.began / 1e9 + 1.0 - time.monotonic()))
    line = wait_for(lambda: scene.live_tasks()[:1] or None, 40, "an epoch runs")[0]
    time.sleep(max(0.0, line.at / 1e9 + scene.plan.epoch + shot.at - time.monotonic()))


def _pick_task(scene: Scene, shot: Shot) -> TaskLine:
    """A task that is in the middle of its work, unless the moment is where an epoch ends."""

    def found() -> TaskLine | None:
        lines = scene.live_tasks()
        line = lines[int(shot.pick * len(lines))] if lines else None
        return line if line is not None and (shot.kind.at_edge or scene.is_busy(line)) else None

    return wait_for(found, 40, "a task is at work")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _worker(scene: Scene, shot: Shot) -> None:
    line = _pick_task(scene, shot)
    _kill(line.pid)
    scene.note(f"killed worker {line.pid} ({line.owner})")


def _executor(scene: Scene, shot: Shot) -> None:
    line = _pick_task(scene, shot)
    java = parent(parent(line.pid))
    if name_of(java) != "java" or java in children(scene.driver.pid):
        raise RuntimeError(f"worker {line.pid} has no executor of its own")
    _kill(java)
    scene.note(f"killed executor {java} of worker {line.pid} ({line.owner})")


def _planners(scene: Scene) -> list[int]:
    javas = [pid for pid in children(scene.driver.pid) if name_of(pid) == "java"]
    return [
        pid for java in javas for pid in children(java) if "python_streaming_source_runner" in command_of(pid)
    ]


def _planner(scene: Scene, _shot: Shot) -> None:
    # The other fault may have killed the driver, which comes back.
    found = wait_for(lambda: _planners(scene) or None, 60, "there is a planner")
    _kill(found[-1])
    scene.note(f"killed planner {found[-1]}")


def _driver(scene: Scene, _shot: Shot) -> None:
    with scene.lifecycle:
        pid, before = scene.driver.pid, {line.pid for line in scene.spec.tasks()}
        scene.driver.kill()
        scene.note(f"killed driver {pid}")
        scene.start_app()
        scene.note(f"driver is back as {scene.driver.pid}")
        if len(scene.plan.shots) == 1:
            _await_continuation(scene, before)


def _await_continuation(scene: Scene, before: set[int]) -> None:
    """Wait until a message runs in a worker that was not there before. Raises RuntimeError if that takes too long."""
    began = time.monotonic()

    def found() -> bool | None:
        workers = {line.pid for line in scene.spec.tasks()} - before
        return any(map(scene.has_history, workers)) or None

    try:
        wait_for(found, CONTINUES_SECONDS_MAX, "a message runs")
    except TimeoutError:
        if scene.log.lag(scene.spec.name, scene.spec.source):
            raise RuntimeError(
                f"no message ran within {CONTINUES_SECONDS_MAX:g} s of the next run's start"
            ) from None
    scene.note(f"the next run continued after {time.monotonic() - began:.1f} s")


def _abandoned(scene: Scene, shot: Shot) -> None:
    line = _pick_task(scene, shot)
    workers = [one.pid for one in scene.live_tasks()]
    with scene.lifecycle:
        daemon = parent(line.pid)
        _kill(daemon)  # it would pass the driver's end on to its workers
        wait_for(lambda: None if running(daemon) else True, 5, "the daemon is gone")
        scene.note("killed the daemon of the workers")
        _driver(scene, shot)
        left = [pid for pid in workers if running(pid)]
        scene.note(f"workers of the dead driver that still run: {left}")


@contextlib.contextmanager
def _no_next_epoch(scene: Scene) -> Iterator[None]:
    """No epoch is planned meanwhile: the one that runs ends, and lanes run on without a task."""
    # The other fault may have killed the driver, which comes back.
    planner = wait_for(lambda: _planners(scene) or None, 60, "there is a planner")[-1]
    with contextlib.suppress(ProcessLookupError):
        os.kill(planner, signal.SIGSTOP)
    scene.note(f"stopped planner {planner}")
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(planner, signal.SIGCONT)
        scene.note(f"planner {planner} goes on")


def _await_detached(scene: Scene, shot: Shot) -> TaskLine:
    """Wait until the epoch has ended; the last task of a worker whose lanes still run. Only without a next epoch."""
    time.sleep(0.5)  # what was planned a moment ago begins
    lines = wait_for(lambda: scene.live_tasks() or None, 40, "an epoch runs")
    time.sleep(max(0.0, max(line.at for line in lines) / 1e9 + scene.plan.epoch + 0.5 - time.monotonic()))

    def found() -> TaskLine | None:
        at_work = [line for line in scene.live_tasks() if scene.is_busy(line)]
        return at_work[int(shot.pick * len(at_work))] if at_work else None

    line = wait_for(found, 20, "a worker's lanes run without a task")
    scene.note(f"the lanes of worker {line.pid} run without a task")
    return line


def _detached(scene: Scene, shot: Shot) -> None:
    with _no_next_epoch(scene):
        line = _await_detached(scene, shot)
        _kill(line.pid)
        scene.note(f"killed worker {line.pid}")


def _attach(scene: Scene, shot: Shot) -> None:
    with _no_next_epoch(scene):
        line = _await_detached(scene, shot)
        last = max(one.number for one in scene.spec.tasks())
        zombie = _stop(scene, line)
    try:
        # Spark gives a task to the worker, which does not answer; then the task is taken away from it.
        time.sleep(2.0)
        begun = {one.number for one in scene.spec.tasks()}
        with scene.lifecycle:
            hang = [number for number in range(last + 1, last + 9) if number not in begun]
            taken = [number for number in hang if scene.driver.alive and scene.driver.kill_task(number)]
        scene.note(f"took tasks {taken} away from it")
        if taken:
            new = scene.await_task(time.monotonic_ns(), elsewhere={line.pid})
            scene.note(f"its part began again in worker {new.pid} ({new.owner})")
    finally:
        _wake(scene, shot, [zombie])


def _elsewhere(scene: Scene, shot: Shot) -> None:
    line = _pick_task(scene, shot)
    (scene.driver.spared / str(line.pid)).touch()
    with scene.lifecycle:
        taken = scene.driver.kill_task(line.number)
    scene.note(f"took task {line.number} away from worker {line.pid}, which lives on: {taken}")
    if taken:
        new = scene.await_task(time.monotonic_ns(), task=line.task)
        scene.note(
            f"its task began again in worker {new.pid} ({new.owner}); the old one runs: {running(line.pid)}"
        )


def _down(scene: Scene, shot: Shot, node: Node, why: str) -> None:
    began = time.monotonic_ns()
    node.kill()
    scene.note(f"killed node {node.id} of the broker{why}")
    time.sleep(shot.lasting)
    wait_for(lambda: _started(node), 60, f"node {node.id} starts")
    scene.note(f"node {node.id} is back")
    scene.outage(began)


def _started(node: Node) -> bool | None:
    """None when it cannot be yet: the sockets of a process that was killed are closed a moment after its death."""
    try:
        node.start()
    except PortTakenError:
        return None
    return True


def _broker(scene: Scene, shot: Shot) -> None:
    nodes = [node for node in scene.broker.nodes if node.alive]
    _down(scene, shot, nodes[int(shot.pick * len(nodes))], "")


def _leader(scene: Scene, shot: Shot) -> None:
    topics = [scene.spec.source, scene.spec.sink, f"{scene.spec.name}.state", "__consumer_offsets"]
    topic = topics[int(shot.pick * len(topics))]
    partition = int(shot.pick * 997) % 4
    found = scene.log.cluster._admin.list_topics(topic, timeout=10).topics[topic].partitions
    leader = found[partition % len(found)].leader
    node = next(node for node in scene.broker.nodes if node.id == leader)
    if not node.alive:
        raise RuntimeError(f"the leader of {topic}/{partition}, node {leader}, is dead already")
    _down(scene, shot, node, f", leader of {topic}/{partition % len(found)}")


def _stop(scene: Scene, line: TaskLine) -> Zombie:
    os.kill(line.pid, signal.SIGSTOP)
    wait_for(lambda: stopped(line.pid) or None, 10, f"worker {line.pid} is stopped")
    zombie = Zombie(pid=line.pid, owner=scene.lanes_of(line), stopped=time.monotonic_ns())
    scene.zombies.append(zombie)
    scene.note(f"stopped worker {line.pid} ({zombie.owner})")
    return zombie


def _wake(scene: Scene, shot: Shot, zombies: Sequence[Zombie]) -> None:
    time.sleep(shot.lasting)
    for zombie in zombies:
        zombie.woken = time.monotonic_ns()
        with contextlib.suppress(ProcessLookupError):
            os.kill(zombie.pid, signal.SIGCONT)
        scene.note(f"worker {zombie.pid} goes on as a zombie")


def _zombie(scene: Scene, shot: Shot) -> None:
    line = _pick_task(scene, shot)
    zombie = _stop(scene, line)
    try:
        with scene.lifecycle:
            taken = scene.driver.kill_task(line.number)
        scene.note(f"took task {line.number} away from it: {taken}")
        if taken:
            new = scene.await_task(zombie.stopped, task=line.task)
            scene.note(f"its task began again in worker {new.pid} ({new.owner})")
        else:  # its task had just ended: the lanes are nobody else's, and continue
            scene.zombies.remove(zombie)
    finally:
        _wake(scene, shot, [zombie])


def _orphan(scene: Scene, shot: Shot) -> None:
    _pick_task(scene, shot)
    lines = scene.live_tasks()
    daemon = parent(lines[0].pid)
    with scene.lifecycle:
        # The daemon first: it would pass the driver's end on to its workers. And before the stop: a group that loses
        # its parent while a member is stopped is hung up and woken by the kernel.
        _kill(daemon)
        wait_for(lambda: None if running(daemon) else True, 5, "the daemon is gone")
        scene.note("killed the daemon of the workers")
        zombies = [_stop(scene, line) for line in lines if running(line.pid)]
        try:
            _driver(scene, shot)
            new = scene.await_task(zombies[-1].stopped)
            scene.note(f"the tasks began again in worker {new.pid} ({new.owner})")
        finally:
            _wake(scene, shot, zombies)


def _weather(scene: Scene, shot: Shot, weather: Weather, what: str) -> None:
    proxy = scene.proxy
    if proxy is None:
        raise RuntimeError("the app does not reach the broker through the proxy")
    began = time.monotonic_ns()
    scene.note(what)
    proxy.on_cut = scene.note
    proxy.weather = weather
    try:
        time.sleep(shot.lasting)
    finally:
        proxy.weather = Weather()
        scene.note("the network is well again")
        scene.outage(began)


def _slow(scene: Scene, shot: Shot) -> None:
    most = 0.05 + shot.pick * 0.5
    weather = Weather(delay=(0.0, most), rng=random.Random(shot.pick))
    _weather(scene, shot, weather, f"the network is slow: up to {most:.2f} s each way")


def _commits(scene: Scene, shot: Shot) -> None:
    cut = Cut.BEFORE if shot.pick < 0.4 else Cut.AFTER
    _weather(scene, shot, Weather(cut=cut), f"commits are cut off {cut} they came to the broker")


def _late(scene: Scene, shot: Shot) -> None:
    _weather(scene, shot, Weather(cut=Cut.LATE), "the ends of transactions come late")
    if scene.proxy is not None:
        scene.proxy.deliver_late()  # of ids that have begun no other transaction since


def _between(scene: Scene, shot: Shot, do: Callable[[], None]) -> None:
    """Do something while the app is down: stopped in order, or with its driver killed."""
    with scene.lifecycle:
        if shot.pick < 0.3 and shot.kind is not Kind.RESTART:
            scene.driver.kill()
            scene.note("killed the driver")
        else:
            scene.stop_app()
            scene.note("stopped the app")
        do()
        scene.start_app()
        scene.note("started the app again")


def _checkpoint(scene: Scene, shot: Shot) -> None:
    def delete() -> None:
        shutil.rmtree(scene.spec.checkpoint, ignore_errors=True)
        scene.note("deleted the checkpoint")

    _between(scene, shot, delete)


def _offsets(scene: Scene, shot: Shot) -> None:
    def delete() -> None:
        # Workers of a driver that was just killed may live for a moment, and commit.
        wait_for(
            lambda: None if scene.live_tasks() and not scene.driver.alive else True,
            10,
            "all workers are gone",
        )
        asked = scene.log.cluster._admin.delete_consumer_groups([scene.spec.name], request_timeout=10)
        for future in asked.values():
            with contextlib.suppress(Exception):  # a group that has not committed yet is not there
                future.result()
        scene.forgotten.append(time.monotonic_ns())
        scene.note("deleted the group's offsets")

    _between(scene, shot, delete)


def _restart(scene: Scene, shot: Shot) -> None:
    _between(scene, shot, lambda: None)


_DOING: dict[Kind, Callable[[Scene, Shot], None]] = {
    Kind.WORKER: _worker,
    Kind.EXECUTOR: _executor,
    Kind.DRIVER: _driver,
    Kind.BROKER: _broker,
    Kind.LEADER: _leader,
    Kind.ZOMBIE: _zombie,
    Kind.ORPHAN: _orphan,
    Kind.SLOW: _slow,
    Kind.COMMITS: _commits,
    Kind.LATE: _late,
    Kind.CHECKPOINT: _checkpoint,
    Kind.OFFSETS: _offsets,
    Kind.RESTART: _restart,
    Kind.PLANNER: _planner,
    Kind.DETACHED: _detached,
    Kind.ABANDONED: _abandoned,
    Kind.ATTACH: _attach,
    Kind.ELSEWHERE: _elsewhere,
}
