"""Parked lanes that are redriven while their messages keep coming."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Poison
from keylane.dlq.reader import read_dead_letters
from keylane.dlq.record import DeadLetter, DeadLetterKind
from keylane.lanes.lane_record import LaneStatus
from keylane.state.admin import AdminClient
from keylane.state.commands import Command, new_command_id, operator_name
from keylane.testing import HistoryWriter, Verdict, check_results, read_history
from support.topics import Log, ids, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from keylane.broker import Broker
    from keylane.lanes.lane_record import LaneRecord

LANES, POISONED, PER_SECOND, SECONDS = 100, 10, 300, 9


def load(rng: random.Random) -> tuple[list[dict[str, Any]], dict[bytes, int]]:
    """Messages of lanes in no order, and per poisoned lane the number of the one that fails: among its first six."""
    messages = [
        {"key": b"k%d" % rng.randrange(LANES), "value": b"%d" % n, "headers": [("event-id", b"%d" % n)]}
        for n in range(PER_SECOND * SECONDS)
    ]
    lanes: defaultdict[bytes, list[int]] = defaultdict(list)
    for number, message in enumerate(messages):
        lanes[message["key"]].append(number)  # type: ignore[index]
    return messages, {key: rng.choice(lanes[key][:6]) for key in rng.sample(sorted(lanes), POISONED)}


def parked_app(name: str, folder: Path, bad: set[int]) -> App:
    app = App(
        name,
        source=f"{name}.in",
        sink=f"{name}.out",
        on_failure="park",
        observer=HistoryWriter(folder / "history"),
    )
    fixed = folder / "fixed"

    def is_bad(number: int) -> bool:
        return number in bad and not fixed.exists()

    @app.stage
    async def work(msg: Message) -> bytes:
        if is_bad(int(msg.value)):
            raise Poison("no")
        return bytes(msg.value)

    return app


def redrive(record: LaneRecord) -> Command:
    return Command(
        do="redrive",
        partition=record.partition,
        key=record.key,
        id=new_command_id(),
        who=operator_name(),
        at=time.time(),
    )


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_redrive_under_load_keeps_lane_order(
    log: Log, spark: SparkSession, broker: Broker, name: str, tmp_path: Path, judge: Callable[..., Verdict]
) -> None:
    log.create(f"{name}.in", f"{name}.out")
    messages, poisoned = load(random.Random(7))
    query = parked_app(name, tmp_path, set(poisoned.values())).start(spark, bootstrap=broker.bootstrap)
    step = PER_SECOND // 10
    sent = log.send(f"{name}.in", messages[:step])
    wait_until(lambda: log.count(f"{name}.out"), 30, "it runs")
    began = time.monotonic()

    def offer() -> None:
        for at in range(step, len(messages), step):
            sent.extend(log.send(f"{name}.in", messages[at : at + step]))
            time.sleep(max(0.0, began + (at + step) / PER_SECOND - time.monotonic()))

    offering = threading.Thread(target=offer)
    offering.start()
    with AdminClient(log.settings, name) as operator:
        wait_until(lambda: len(operator.lanes()) == POISONED, 30, "the poisoned lanes are parked")
        time.sleep(max(0.0, began + 4 - time.monotonic()))
        (tmp_path / "fixed").touch()
        lanes = {record.key: record for record in operator.lanes()}
        assert {record.stop for record in lanes.values()} == {LaneStatus.PARKED}
        assert lanes.keys() == poisoned.keys()
        orders = [redrive(record) for record in lanes.values()]
        operator.give(orders)
        answers = [operator.answer(order, 10) for order in orders]
        assert offering.is_alive(), "nothing came while lanes were redriven: this proves nothing"
        wait_until(lambda: operator.lanes() == [], 10, "no lane is parked")
        offering.join()
        wait_until(lambda: log.lag(name, f"{name}.in") == 0, 20, "everything is done")
        query.stop()
        assert query.exception() is None
        assert operator.open_commands() == []

    # The history: every message once, in order, the parked ones later.
    verdict = judge(sent)
    assert verdict.repeats == 0
    assert len(sent) == len(messages)
    # The results: all of them, once, in the order of their lane.
    rows = log.read(f"{name}.in")
    check_results(ids(rows), ids(log.read(f"{name}.out"))).raise_if_bad()
    # The letters: of each poisoned lane the message that failed and some that followed it, without a hole, once.
    letters = [
        each for each in read_dead_letters(log.settings, f"{name}.dlq") if isinstance(each, DeadLetter)
    ]
    assert {letter.kind for letter in letters} == {DeadLetterKind.PARKED}
    assert {letter.key for letter in letters} == poisoned.keys()
    for key, order, answer in zip(lanes, orders, answers, strict=True):
        lane = [row.offset for row in rows if row.key == key]
        first = lanes[key].offset
        mine = [letter for letter in letters if letter.key == key]
        offsets = [letter.source_offset for letter in mine]
        assert offsets == [offset for offset in lane if offset >= first][: len(offsets)]
        assert [letter.value for letter in mine[:1]] == [b"%d" % poisoned[key or b""]]
        assert answer is not None
        assert answer.result == f"{len(mine)} through, 0 dead again, 0 still parked"
        assert answer.ok
        assert answer.at - order.at < 5
    # Nothing of a parked lane ran between the failure and the redrive.
    for event in read_history(tmp_path / "history"):
        if event.key in lanes and event.outcome is None and event.offset > lanes[event.key].offset:
            assert event.at > orders[list(lanes).index(event.key)].at
