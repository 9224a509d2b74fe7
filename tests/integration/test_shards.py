"""Shards: several runs of one app, each with its share of the partitions, against a real broker."""

from __future__ import annotations

import contextlib
import json
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from keylane import App, Message, SettingsError
from keylane.cli.main import app as command
from keylane.errors import TakenOverError
from keylane.offsets.shard import Shard
from keylane.state.admin import AdminClient
from keylane.state.labels import Labels
from keylane.state.ownership import check_still_ours, take_over
from keylane.state.topic import StateTopic, order_stop
from keylane.testing import EventKind, HistoryWriter, check, check_results, read_history
from support.planned import Planned
from support.topics import Running, below, ids, kill, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Literal

    from pyspark.sql import SparkSession

    from keylane.broker import Broker
    from keylane.testing import Verdict
    from support.topics import Log

FIRST, SECOND = Shard(1, 2), Shard(2, 2)


def shop(name: str, folder: Path, commit: Literal["live", "epoch"] = "live") -> App:
    app = App(
        name,
        source=f"{name}.in",
        sink=f"{name}.out" if commit == "live" else None,
        observer=HistoryWriter(folder / "history"),
        commit=commit,
    )

    @app.stage
    async def work(msg: Message) -> bytes:
        return bytes(msg.value)

    return app


def load(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {"key": b"k%d" % (n % 40), "value": b"%d" % n, "headers": [("event-id", b"e%d" % n)]}
        for n in range(first, first + count)
    ]


def successor(log: Log, name: str, partitions: list[int], run: str, since: dict[int, int]) -> str | None:
    """The other run that owns one of these partitions now."""
    state = StateTopic(log.settings, name, f"{name}.state", partitions, run, since=since, labels=Labels(None))
    try:
        state.restore()
        return None if state.successor is None else str(state.successor["run"])
    finally:
        state.close()


def test_run_of_a_shard_owns_only_its_partitions(log: Log, name: str) -> None:
    log.create(f"{name}.state")
    one = take_over(log.settings, name, f"{name}.state", 4, "one", FIRST)
    two = take_over(log.settings, name, f"{name}.state", 4, "two", SECOND)
    assert (sorted(one), sorted(two)) == ([0, 2], [1, 3])
    assert successor(log, name, [0, 2], "one", one) is None
    assert successor(log, name, [1, 3], "two", two) is None
    again = take_over(log.settings, name, f"{name}.state", 4, "again", SECOND)
    assert successor(log, name, [1, 3], "two", two) == "again"
    assert successor(log, name, [0, 2], "one", one) is None
    whole = take_over(log.settings, name, f"{name}.state", 4, "whole")
    assert successor(log, name, [0, 2], "one", one) == "whole"
    assert successor(log, name, [1, 3], "again", again) == "whole"
    take_over(log.settings, name, f"{name}.state", 4, "third", Shard(3, 3))
    assert successor(log, name, [0, 1, 2, 3], "whole", whole) == "third", "it lost partition 2, and ends"


def test_restart_is_refused_when_any_partition_was_lost(log: Log, name: str) -> None:
    """Otherwise two shards of different counts would take the same partition from each other for ever."""
    log.create(f"{name}.state")
    take_over(log.settings, name, f"{name}.state", 4, "mine")
    check_still_ours(log.settings, name, f"{name}.state")
    record = json.dumps({"run": "other", "who": "elsewhere:1", "at": 5.0, "shard": "2/3"}).encode()
    log.send(f"{name}.state", [{"key": b"run", "value": record, "partition": 1}])
    with pytest.raises(TakenOverError, match=r"partitions of app .* were taken over by a run of shard 2/3"):
        check_still_ours(log.settings, name, f"{name}.state")


def test_two_shards_process_a_backlog_in_order(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    sent = log.send(f"{name}.in", load(400))
    shards = [Planned(log, shop(name, tmp_path), run=f"r{s}", shard=s, tasks=2) for s in (FIRST, SECOND)]
    for number, one in enumerate(shards):
        assert one.plan()
        done = one.attempt()
        assert {delivery.partition % 2 for delivery in done} == {number}
        one.commit()
        assert not one.plan(), "its share is done, whatever the other has"
    assert judge(sent).repeats == 0
    assert not log.lag(name, f"{name}.in")
    check_results(ids(log.read(f"{name}.in")), ids(log.read(f"{name}.out"))).raise_if_bad()
    with AdminClient(log.settings, name) as admin:
        plans = admin.plans()
    assert [plan["shard"] for plan in plans] == ["1/2", "2/2"]
    told = CliRunner().invoke(command, ["plan", name, "--bootstrap", log.bootstrap])
    assert "shard 1/2, epoch 1: 2 tasks" in told.stdout
    assert "shard 2/2, epoch 1: 2 tasks" in told.stdout
    assert all(told.stdout.count(f"partition {p}\n") == 1 for p in range(4)), told.stdout


def test_other_number_of_shards_continues_where_they_ended(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=6)
    sent = log.send(f"{name}.in", load(300))
    for shard in (FIRST, SECOND):
        one = Planned(log, shop(name, tmp_path), run=f"r{shard}", shard=shard)
        assert one.plan()
        one.attempt()
        one.commit()
    sent += log.send(f"{name}.in", load(300, first=300))
    for shard in (Shard(1, 3), Shard(2, 3), Shard(3, 3)):
        one = Planned(log, shop(name, tmp_path), run=f"r{shard}", shard=shard)
        assert one.plan()
        one.attempt()
        one.commit()
    sent += log.send(f"{name}.in", load(300, first=600))
    one = Planned(log, shop(name, tmp_path), run="whole")
    assert one.plan()
    one.attempt()
    one.commit()
    assert judge(sent).repeats == 0
    assert not log.lag(name, f"{name}.in")
    with AdminClient(log.settings, name) as admin:
        assert [(plan["run"], plan["shard"]) for plan in admin.plans()] == [("whole", "1/1")]


def test_source_is_found_when_only_a_later_shard_has_run(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", f"{name}.out")
    assert Planned(log, shop(name, tmp_path), shard=SECOND).plan() is False
    log.send(f"{name}.in", load(40))
    one = Planned(log, shop(name, tmp_path), shard=SECOND, run="r2")
    assert one.plan()
    with AdminClient(log.settings, name) as admin:
        assert admin.source == f"{name}.in"
        assert [plan["shard"] for plan in admin.plans()] == ["2/2"]


def test_stop_of_a_shard_is_written_to_its_partitions_only(log: Log, name: str) -> None:
    """A stop is a compacted record: in another shard's partition it would replace that shard's own."""
    log.create(f"{name}.state")
    order_stop(log.settings, f"{name}.state", 4, "r2", shard=SECOND)
    assert {row.partition for row in log.read(f"{name}.state")} == {1, 3}


def test_runs_of_other_shards_are_fenced_when_they_commit(log: Log, name: str, tmp_path: Path) -> None:
    """With commit="epoch" the planner commits, under an id that another number of shards does not have."""
    log.create(f"{name}.in", f"{name}.out")
    log.send(f"{name}.in", load(200))
    old = Planned(log, shop(name, tmp_path, "epoch"), run="old", shard=SECOND, commit="epoch")
    assert old.plan()
    old.attempt()
    new = Planned(log, shop(name, tmp_path, "epoch"), run="new", commit="epoch")
    with pytest.raises(TakenOverError):
        old.commit()
    assert log.lag(name, f"{name}.in") == 200, "nothing of it was committed"
    while new.plan():
        new.attempt()
        new.commit()
    assert not log.lag(name, f"{name}.in")


def test_shard_leaves_new_partitions_to_a_run_of_the_whole_app(
    log: Log, name: str, tmp_path: Path, judge: Callable[..., Verdict], caplog: pytest.LogCaptureFixture
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    sent = log.send(f"{name}.in", load(100))
    first = Planned(log, shop(name, tmp_path), shard=FIRST)
    second = Planned(log, shop(name, tmp_path), shard=SECOND, run="r2")
    log.create(f"{name}.in", partitions=4)
    with pytest.raises(
        SettingsError, match=r"has 4 partitions and had 2, and shards do not read new partitions"
    ):
        first.plan()
    first.reader._target = second.reader._target = None  # as if it were no backlog
    for one in (first, second):
        assert one.plan()
        assert {int(p) for p in one.planned["starts"]} <= {0, 1}
        assert one.planned["of"] == 2
    assert "run the app without a shard until it says that it reads them" in caplog.text
    whole = Planned(log, shop(name, tmp_path), run="whole")
    while whole.plan():
        whole.attempt()
        whole.commit()
    sent += log.send(f"{name}.in", load(200, first=100))
    for shard in (FIRST, SECOND):
        one = Planned(log, shop(name, tmp_path), run=f"later{shard}", shard=shard)
        assert one.plan()
        assert one.planned["former"] == [2], "also where it is not written"
        one.attempt()
        one.commit()
    assert judge(sent).repeats == 0
    assert not log.lag(name, f"{name}.in")


def test_checkpoint_of_another_shard_plans_only_own_partitions(log: Log, name: str, tmp_path: Path) -> None:
    log.create(f"{name}.in", f"{name}.out")
    log.send(f"{name}.in", load(100))
    whole = Planned(log, shop(name, tmp_path), tasks=2)
    assert whole.plan()
    one = Planned(log, shop(name, tmp_path), run="r2", shard=SECOND, tasks=2)
    plans = [task.plan for task in one.reader.partitions(whole.at, whole.planned)]
    assert sorted(p for plan in plans for p in plan.starts) == [1, 3]


@pytest.mark.timeout(60)
def test_shard_that_cannot_run_is_refused(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path
) -> None:
    log.create(f"{name}.in", f"{name}.out", partitions=2)
    app = shop(name, tmp_path)
    whole = App(name, source=f"{name}.in", order="global", on_failure="block")

    @whole.stage
    async def one_by_one(msg: Message) -> None: ...

    with pytest.raises(SettingsError, match=r"shard 3/8 has no partition: app .* reads 2 partitions"):
        app.start(spark, bootstrap=broker.bootstrap, shard="3/8")
    with pytest.raises(SettingsError, match="option shard: expected a shard such as 3/8"):
        app.start(spark, bootstrap=broker.bootstrap, shard="3 of 8")
    with pytest.raises(SettingsError, match="order='global' has lanes over all partitions"):
        whole.start(spark, bootstrap=broker.bootstrap, shard="1/2")


@pytest.mark.timeout(120)
def test_shards_of_one_session_share_its_workers(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    """Each with one of two slots, and a checkpoint folder that they were both given."""
    log.create(f"{name}.in", f"{name}.out")
    app = shop(name, tmp_path)
    queries = [
        app.start(
            spark,
            bootstrap=broker.bootstrap,
            shard=shard,
            tasks=1,
            epoch=2.0,
            checkpoint_location=tmp_path / "checkpoint",
        )
        for shard in ("1/2", "2/2")
    ]
    sent = []
    for number in range(40):
        sent += log.send(f"{name}.in", load(40, first=40 * number))
        time.sleep(0.2)
    wait_until(lambda: not log.lag(name, f"{name}.in"), 60, "everything is done")
    queries[0].stop()
    assert queries[0].drained
    assert queries[1].isActive, "the stop was not for this one"
    sent += log.send(f"{name}.in", load(40, first=2000))
    wait_until(
        lambda: log.lag(name, f"{name}.in") == sum(one.partition % 2 == 0 for one in sent[-40:]),
        30,
        "its share",
    )
    queries[1].stop()
    assert queries[1].drained
    assert sorted(one.name for one in (tmp_path / "checkpoint").iterdir()) == ["shard-1-of-2", "shard-2-of-2"]
    rest = app.start(spark, bootstrap=broker.bootstrap, available_now=True)
    assert rest.awaitTermination(60)
    assert judge(sent).repeats == 0


APP = """
import asyncio
from keylane import App, Message
from keylane.testing import HistoryWriter

app = App("{name}", source="{name}.in", sink="{name}.out", observer=HistoryWriter({history!r}))

@app.stage
async def work(msg: Message):
    await asyncio.sleep(0.005)
    return msg.value
"""


@pytest.mark.timeout(240)
def test_death_of_a_shard_is_not_noticed_by_another(
    log: Log, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    """Two processes; one of them, its Java and its workers are killed under load, and it is started again."""
    log.create(f"{name}.in", f"{name}.out")
    (tmp_path / "shop.py").write_text(APP.format(name=name, history=str(tmp_path / "history")))
    arguments = ("shop:app", "--bootstrap", broker.bootstrap, "--master", "local[1]", "--epoch", "3")
    sent: list[Any] = []

    def offer(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            sent.extend(log.send(f"{name}.in", load(20, first=len(sent))))
            time.sleep(0.05)

    def lag_of(number: int) -> dict[str, Any]:
        told = CliRunner().invoke(
            command, ["lag", name, "--json", "--over", "1", "--bootstrap", log.bootstrap]
        )
        found: dict[str, Any] = json.loads(told.stdout)
        one: dict[str, Any] = next(one for one in found["partitions"] if one["partition"] == number)
        return one | {"tasks": found["tasks"]}

    with Running(tmp_path, *arguments, "--shard", "1/2") as first:
        with Running(tmp_path, *arguments, "--shard", "2/2") as second:
            first.says("runs as shard 1/2")
            second.says("runs as shard 2/2")
            sent.extend(log.send(f"{name}.in", load(40)))
            wait_until(lambda: not log.lag(name, f"{name}.in"), 60, "both work")
            offer(4.0)
            killed = time.monotonic_ns()
            doomed = below(second.pid)
            kill(second.pid)
            for pid in doomed:
                with contextlib.suppress(ProcessLookupError):  # it has ended with its parent
                    kill(pid)
            offer(8.0)
        rest = time.monotonic_ns()
        wait_until(
            lambda: log.lag(name, f"{name}.in") <= sum(one.partition % 2 for one in sent), 20, "its share"
        )
        found = [lag_of(number) for number in (0, 1)]
        assert [one["state"] in ("idle", "keeping up") for one in found] == [True, False], found
        assert found[1]["state"] == "not running", found
        with Running(tmp_path, *arguments, "--shard", "2/2") as again:
            offer(1.0)
            again.until(lambda: not log.lag(name, f"{name}.in"), 60, "the shard continues")
            first.send(15)
            code, facts = first.ends(within=40)
            assert (code, facts["drained"]) == (0, True), first.lines
            again.send(15)
            code, facts = again.ends(within=40)
            assert (code, facts["drained"]) == (0, True), again.lines
    assert not any("again" in line or "failed" in line for line in first.lines), first.lines
    judge(sent, allow_repeats=1)
    events = read_history(tmp_path / "history").events
    starts = [e.seq for e in events if e.partition % 2 == 0 and e.kind is EventKind.START]
    beside = [at for at in starts if killed - 2e9 < at < rest]
    gap = max(later - earlier for earlier, later in pairwise(beside)) / 1e9
    assert gap < 1.0, "the other shard's messages were not delayed"
    owners = {e.owner for e in events if e.partition % 2 == 0}
    assert len(owners) == 1, "and its lanes stayed with their worker"
    check(read_history(tmp_path / "history"), sent=sent, allow_repeats=1).raise_if_bad()
    check_results(
        ids(log.read(f"{name}.in")), ids(log.read(f"{name}.out")), allow_duplicates=True
    ).raise_if_bad()
