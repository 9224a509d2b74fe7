"""Who owns what: claims, fences and take-overs against a real broker; no Spark."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException, TopicPartition

from keylane.broker import Broker
from keylane.errors import BrokerError, FencedError, TakenOverError
from keylane.kafka import transactional_client
from keylane.kafka.cluster import Cluster
from keylane.kafka.transactional_client import discard, transactional_producer
from keylane.kafka.transactional_writer import TransactionalWriter
from keylane.offsets.slots import ALL, Slots
from keylane.state import fences, ownership
from keylane.state.ownership import (
    ANSWER_SECONDS,
    LEAVING_EVERY_SECONDS,
    Ownership,
    check_still_ours,
    remember_newest_run,
    take_over,
)
from keylane.state.topic import StateTopic
from support.raw_kafka import hanging_record
from support.state_log import LABELS
from support.topics import Log, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from keylane.kafka.settings import KafkaSettings


class Owner:
    """What a task has: a transactional writer, a view of the state topic, and its ownership."""

    def __init__(
        self,
        settings: KafkaSettings,
        app: str,
        who: str,
        *,
        run: str = "r1",
        patience: float = 20,
        slots: Slots = ALL,
        since: dict[int, int] | None = None,
    ) -> None:
        self.slots = slots
        consumer = settings.consumer(app)
        self.app = app
        self.writer = TransactionalWriter(
            settings, app, f"{app}.state", consumer.consumer_group_metadata(), labels=LABELS
        )
        consumer.close()
        self.state = StateTopic(settings, app, f"{app}.state", range(2), run, since=since, labels=LABELS)
        self.state.restore()
        self.ownership = Ownership(settings, app, self.state, self.writer, run, who, patience)

    def claim(self) -> bool:
        return self.ownership.claim(dict.fromkeys(range(2), self.slots))

    def commit(self, offset: int) -> None:
        """Progress and a record, in one transaction."""

        async def one() -> None:
            self.writer.attach()
            self.writer.put_state(0, b"thing", b"%d" % offset)
            async with self.writer.exclusive():
                await self.writer.commit_with([TopicPartition(f"{self.app}.in", 0, offset)])

        asyncio.run(one())

    def release(self) -> None:
        async def one() -> None:
            self.writer.attach()
            async with self.writer.exclusive():
                await self.writer.commit_with(state_records=self.ownership.release())

        asyncio.run(one())


@pytest.fixture
def app(log: Log, name: str) -> str:
    log.create(f"{name}.in", f"{name}.state", partitions=2)
    return name


def progress(log: Log, app: str) -> int:
    return Cluster(log.settings).committed(app, f"{app}.in", [0]).get(0, (-1, None))[0]


def test_later_claim_fences_earlier_owners(log: Log, app: str) -> None:
    first = Owner(log.settings, app, "first")
    assert first.claim()
    first.commit(10)
    second = Owner(log.settings, app, "second")
    assert not second.claim(), "somebody had to be fenced"
    second.commit(20)
    with pytest.raises(FencedError):
        first.commit(11)
    assert progress(log, app) == 20

    def lost() -> bool:
        first.state.poll()
        return first.ownership.lost

    wait_until(lost, 5, "it can see so before it writes")
    assert not second.ownership.lost
    third = Owner(log.settings, app, "third")
    assert set(third.state.owners[0]) == {second.writer.id}, "the fenced one's claim was taken back"


def test_released_owner_is_not_fenced(log: Log, app: str) -> None:
    first = Owner(log.settings, app, "first")
    assert first.claim()
    first.release()
    second = Owner(log.settings, app, "second")
    assert second.claim()
    second.release()
    assert first.claim(), "the same scribe may claim again: nobody has fenced it"


def test_a_zombie_in_the_middle_of_a_transaction_loses_it(log: Log, app: str) -> None:
    zombie = Owner(log.settings, app, "zombie")
    zombie.claim()
    zombie.commit(5)
    # It stops after its records were sent, before their commit.
    zombie.writer._client.put((f"{app}.state", b"late", b"thing", 0, None, None, 0, []))
    zombie.writer._client._producer.flush(5)
    began = time.monotonic()
    heir = Owner(log.settings, app, "heir")
    heir.claim()
    assert time.monotonic() - began < 5
    assert heir.state.owners[0].keys() == {heir.writer.id}
    with pytest.raises(FencedError):
        zombie.writer._client.commit([TopicPartition(f"{app}.in", 0, 6)])
    assert progress(log, app) == 5
    values = [row.value for row in log.read(f"{app}.state")]
    assert b"5" in values
    assert b"late" not in values, "what was not committed is not read"


def test_of_two_that_claim_at_the_same_time_one_is_left(log: Log, app: str) -> None:
    """Five rounds: the last owner can write, and all others cannot."""
    owners = [Owner(log.settings, app, f"o{number}") for number in range(3)]
    for number in range(5):
        gate = threading.Barrier(len(owners))

        def race(owner: Owner, gate: threading.Barrier = gate) -> None:
            gate.wait()
            owner.claim()

        with ThreadPoolExecutor(len(owners)) as pool:
            for outcome in [pool.submit(race, owner) for owner in owners]:
                outcome.exception()
        left = []
        for owner in owners:
            try:
                owner.commit(100 + number)
            except FencedError:
                continue
            left.append(owner)
        assert len(left) <= 1, "two owners at once"
        fresh = Owner(log.settings, app, "next")
        fresh.claim()
        fresh.commit(200 + number)  # the last owner gets through
        owners = [fresh, *(Owner(log.settings, app, f"n{number}.{i}") for i in range(2))]


def test_another_run_is_given_time_to_leave(log: Log, app: str) -> None:
    take_over(log.settings, app, f"{app}.state", 2, "r1")
    old = Owner(log.settings, app, "old")
    old.claim()
    take_over(log.settings, app, f"{app}.state", 2, "r2")
    steps: list[str] = []

    def leave() -> None:
        while old.state.successor is None:
            old.state.poll()
            time.sleep(0.02)

        async def say() -> None:
            old.writer.attach()
            old.ownership.leaving()
            await old.writer.commit()

        for _ in range(4):
            asyncio.run(say())
            time.sleep(LEAVING_EVERY_SECONDS)
        steps.append("left")
        old.release()

    leaving = threading.Thread(target=leave)
    leaving.start()
    new = Owner(log.settings, app, "new", run="r2")
    assert new.claim(), "it was not fenced"
    steps.append("claimed")
    leaving.join()
    assert steps == ["left", "claimed"]
    with pytest.raises(TakenOverError, match="taken over by another run"):
        old.claim()


def test_run_hidden_by_dead_tasks_is_not_taken_over(log: Log, app: str) -> None:
    """With exactly_once a killed task leaves a transaction open; records behind it are not readable."""
    take_over(log.settings, app, f"{app}.state", 2, "r1")
    old = Owner(log.settings, app, "old")
    old.claim()
    dying = transactional_producer(log.settings, old.writer.id)
    dying.begin_transaction()
    for partition in range(2):
        dying.produce(f"{app}.state", b"1", b"thing", partition=partition)
    dying.flush(10)
    since = take_over(log.settings, app, f"{app}.state", 2, "r2")
    check_still_ours(log.settings, app, f"{app}.state")
    began = time.monotonic()
    new = Owner(log.settings, app, "new", run="r2", since=since)
    assert not new.claim(), "the old one was fenced"
    assert time.monotonic() - began < 10
    with pytest.raises(TakenOverError, match="taken over by another run"):
        Owner(log.settings, app, "late").claim()


def test_another_run_that_dies_while_it_is_leaving_is_fenced(log: Log, app: str) -> None:
    old = Owner(log.settings, app, "old", patience=60)
    old.claim()
    take_over(log.settings, app, f"{app}.state", 2, "r2")

    async def say() -> None:
        old.writer.attach()
        old.ownership.leaving()
        await old.writer.commit()

    asyncio.run(say())
    new = Owner(log.settings, app, "new", run="r2", patience=60)
    began = time.monotonic()
    assert not new.claim()
    assert time.monotonic() - began < 8


def test_another_run_that_does_not_answer_is_fenced(log: Log, app: str) -> None:
    old = Owner(log.settings, app, "old")
    old.claim()
    take_over(log.settings, app, f"{app}.state", 2, "r2")
    new = Owner(log.settings, app, "new", run="r2")
    began = time.monotonic()
    assert not new.claim()
    assert ANSWER_SECONDS < time.monotonic() - began < ANSWER_SECONDS + 3
    with pytest.raises(FencedError):
        old.commit(1)


def test_simultaneous_runs_agree_on_the_owner(log: Log, app: str) -> None:
    for number in range(3):
        runs = [f"{number}-{i}" for i in range(3)]
        with ThreadPoolExecutor(len(runs)) as pool:
            asked = [pool.submit(take_over, log.settings, app, f"{app}.state", 2, run) for run in runs]
            failed = [one.exception() for one in asked]
        assert all(error is None or isinstance(error, TakenOverError) for error in failed)
        state = StateTopic(log.settings, app, f"{app}.state", range(2), "", labels=LABELS)
        state.restore()
        state.close()
        assert state.runs[0]["run"] == state.runs[1]["run"], "the partitions name different runs"
        winner = runs.index(state.runs[0]["run"])
        assert failed[winner] is None


def test_fenced_client_is_kept_until_its_requests_end(log: Log, app: str) -> None:
    one = transactional_producer(log.settings, f"{app}.same")
    one.begin_transaction()
    for partition in range(2):
        one.produce(f"{app}.state", b"half", b"a claim", partition)
    transactional_producer(log.settings, f"{app}.same")
    leaving = discard(one)
    leaving.join(10)
    assert not leaving.is_alive()
    assert not len(one)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_runs_that_fence_each_other_leave_their_process_alive(log: Log, app: str) -> None:
    """A fenced client that is destroyed too early frees its error twice: one of some 200 races ended in that."""
    race = (
        "import sys\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "from keylane.errors import TakenOverError\nfrom keylane.state.ownership import take_over\n"
        "from keylane.kafka.settings import KafkaSettings\n"
        "settings, app, late = KafkaSettings(sys.argv[1]), sys.argv[2], 0\n"
        "for race in range(400):\n"
        "    with ThreadPoolExecutor(2) as pool:\n"
        "        asked = [pool.submit(take_over, settings, app, app + '.state', 2, f'{race}-{i}') for i in range(2)]\n"
        "    late += sum(isinstance(one.exception(), TakenOverError) for one in asked)\n"
        "print(late)"
    )
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        told = subprocess.run(
            [sys.executable, "-c", race, log.bootstrap, app],
            capture_output=True,
            text=True,
            timeout=390,
            check=False,
        )
    finally:
        for one in busy:
            one.kill()
            one.wait()
    assert told.returncode == 0, told.stderr[-2000:]
    assert int(told.stdout) > 40, "hardly anybody was fenced: it proves little"


def test_restart_detects_another_run(log: Log, name: str) -> None:
    log.create(f"{name}.in")
    log.create(f"{name}.state", cleanup_policy="compact")
    check_still_ours(log.settings, name, f"{name}.state")  # owned by no run
    take_over(log.settings, name, f"{name}.state", 4, "one")
    check_still_ours(log.settings, name, f"{name}.state")
    subprocess.run([sys.executable, "-c", ANOTHER, log.bootstrap, name, "two"], check=True, timeout=30)
    with pytest.raises(TakenOverError, match="was taken over by another run, started by"):
        check_still_ours(log.settings, name, f"{name}.state")


ANOTHER = (
    "import sys\nfrom keylane.state.ownership import take_over\nfrom keylane.kafka.settings import KafkaSettings\n"
    "take_over(KafkaSettings(sys.argv[1]), sys.argv[2], sys.argv[2] + '.state', 4, sys.argv[3])"
)


@pytest.mark.parametrize("failures", [1, 3])
def test_failed_first_take_over_is_not_a_take_over_by_another(
    log: Log, name: str, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    log.create(f"{name}.state", cleanup_policy="compact")
    state = f"{name}.state"

    def another(run: str) -> None:
        subprocess.run([sys.executable, "-c", ANOTHER, log.bootstrap, name, run], check=True, timeout=30)

    another("ended-long-ago")
    remember_newest_run(log.cluster, name, state)
    for _ in range(failures):
        with monkeypatch.context() as away:
            away.setattr(ownership, "_take_over", no_broker)
            with pytest.raises(BrokerError, match="could not be taken over"):
                take_over(log.settings, name, state, 4, "mine")
        check_still_ours(log.settings, name, state)
    another("newer")
    with pytest.raises(TakenOverError, match="was taken over by another run"):
        check_still_ours(log.settings, name, state)


def no_broker(*_given: object, **_named: object) -> dict[int, int]:
    raise KafkaException(ClientError(ClientError.TOPIC_AUTHORIZATION_FAILED))


def test_abandoned_claim_blocks_no_other(log: Log, app: str) -> None:
    """Its transaction is open and its claim not readable: without more, no task would know whom to fence."""
    one = Owner(log.settings, app, "one")
    one.writer._client.put((f"{app}.state", b"half", b"a claim", 0))
    one.writer._client._producer.flush(5)
    one.writer.close()
    other = Owner(log.settings, app, "other")
    began = time.monotonic()
    assert other.claim()
    assert time.monotonic() - began < 5


def count_fences(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the new clients of each transactional id, in a claim."""
    counted: Counter[str] = Counter()

    def counting(settings: KafkaSettings, transactional_id: str, *more: Any, **named: Any) -> Any:
        counted[transactional_id] += 1
        return transactional_producer(settings, transactional_id, *more, **named)

    for module in (ownership, transactional_client):
        monkeypatch.setattr(module, "transactional_producer", counting)
    return counted


def leave_claim_open(owner: Owner) -> None:
    """What is left of a worker that is killed while it claims."""
    owner.ownership._owned = dict.fromkeys(range(2), owner.slots)
    client = owner.writer._client
    for partition, name, value in owner.ownership._notes(owner.ownership.owned):
        client.put((owner.state.topic, value, name, partition))
    client._producer.flush(5)


def test_worker_killed_while_it_claims_is_fenced(log: Log, app: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transaction hides its own claim, and that the owner before it was fenced."""
    old = Owner(log.settings, app, "old")
    assert old.claim()
    killed = Owner(log.settings, app, "killed")
    leave_claim_open(killed)
    new = Owner(log.settings, app, "new")
    counted = count_fences(monkeypatch)
    began = time.monotonic()
    assert not new.claim()
    assert time.monotonic() - began < 20, "not when the broker ends the transaction, after a minute"
    assert counted == {old.writer.id: 1, killed.writer.id: 1}
    new.commit(10)
    for one in (old, killed):
        with pytest.raises(FencedError):
            one.commit(11)


def test_transaction_that_the_coordinator_forgot_is_ended(
    app: str, unverified: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a broker's restart: no fence ends it, and nothing behind it can be read."""
    monkeypatch.setattr(fences, "HANGING_SECONDS", 3.0)
    log = unverified
    log.create(f"{app}.in", f"{app}.state", f"{app}.out", partitions=2)
    old = Owner(log.settings, app, "old")
    assert old.claim()
    old.commit(10)
    hanging_record(log.bootstrap, old.writer.id, {f"{app}.state": 1, f"{app}.out": 0})
    new = Owner(log.settings, app, "new")
    new.writer.limits = {f"{app}.state": 0, f"{app}.out": 0}
    counted = count_fences(monkeypatch)
    began = time.monotonic()
    assert not new.claim()
    assert time.monotonic() - began < 25
    assert counted[old.writer.id] <= 3, "one fence, and one abort for each of the two places"
    for topic in (f"{app}.state", f"{app}.out"):
        assert log.cluster.ends(topic, range(2)) == log.cluster.ends(topic, range(2), committed=True)
    assert [row.value for row in log.read(f"{app}.out")] == []
    new.commit(11)
    assert progress(log, app) == 11


@pytest.fixture
def unverified() -> Iterator[Log]:
    """A broker that takes a record of a transaction that its coordinator does not know, as old brokers do."""
    with Broker(settings={"transaction.partition.verification.enable": False}) as broker:
        yield Log(broker.bootstrap)


def test_owners_of_other_slots_leave_each_other_alone(log: Log, app: str) -> None:
    low = Owner(log.settings, app, "low", slots=Slots(0, 999))
    high = Owner(log.settings, app, "high", slots=Slots(1000, 65535))
    assert low.claim()
    assert high.claim(), "nobody had to be fenced"
    low.commit(10)
    high.commit(11)
    middle = Owner(log.settings, app, "middle", slots=Slots(500, 1500))
    assert not middle.claim()
    for one in (low, high):
        with pytest.raises(FencedError):
            one.commit(12)
    assert progress(log, app) == 11


def test_progress_is_readable_behind_a_dead_open_transaction(log: Log, app: str) -> None:
    owner = Owner(log.settings, app, "killed")
    owner.claim()
    owner.commit(10)
    client = owner.writer._client
    client.begin()
    client._producer.send_offsets_to_transaction([TopicPartition(f"{app}.in", 0, 20)], client._group, 10)
    began = time.monotonic()
    assert progress(log, app) == 10
    assert time.monotonic() - began < 5, "nobody waits for it who only wants to know"
    client.close()
    assert Cluster(log.settings).committed(app, f"{app}.in", [0], stable=True)[0][0] == 10


def test_rested_view_catches_up_with_later_commits(log: Log, app: str) -> None:
    """As the planner reads: the log ends in a transaction marker, which a reader is not told about."""
    cluster = Cluster(log.settings)
    view = StateTopic(log.settings, app, f"{app}.state", range(2), "r1", labels=LABELS, rests=True)
    view.restore()
    view.rest()
    for turn in range(3):
        owner = Owner(log.settings, app, f"task {turn}")
        owner.claim()
        view.catch_up(cluster.ends(f"{app}.state", range(2)))
        view.rest()
        assert [claim.who for claim in view.owners[1].values()] == [f"task {turn}"]
        owner.release()
        began = time.monotonic()
        view.catch_up(cluster.ends(f"{app}.state", range(2)))
        view.rest()
        assert time.monotonic() - began < 1
        assert not view.owners[1]
    view.close()


def test_suspended_task_detects_its_replacement(log: Log, app: str) -> None:
    """Before it begins again after a transaction that was not taken: it would fence the one that took its place."""
    cluster = Cluster(log.settings)
    low, high = Slots(0, 999), Slots(1000, 65535)
    old, beside = Owner(log.settings, app, "old", slots=low), Owner(log.settings, app, "beside", slots=high)
    old.claim()
    beside.claim()
    assert not old.ownership.lost_by_now(cluster)
    Owner(log.settings, app, "new", slots=low).claim()
    assert not old.ownership.lost, "it has not looked"
    assert old.ownership.lost_by_now(cluster)
    assert not beside.ownership.lost_by_now(cluster)
