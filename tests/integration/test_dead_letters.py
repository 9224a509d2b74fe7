"""Dead letters in a real topic: read back, listed and shown."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from keylane.dlq import reader as dlq_reader
from keylane.dlq.headers import dead_letter_headers
from keylane.dlq.reader import (
    SeenDeadLetters,
    read_all_dead_letters,
    read_dead_letters,
    read_dead_letters_at,
)
from keylane.dlq.record import DeadLetter, DeadLetterKind, DeadLetterMessage, UnreadableDeadLetter
from keylane.dlq.spool import Spool, SpooledDeadLetter
from keylane.errors import BrokerError
from keylane.kafka.settings import KafkaSettings
from keylane.policies.failure_info import FailedAttempt, FailureInfo
from support.state_log import identity

if TYPE_CHECKING:
    from pathlib import Path

    from keylane.message import Headers
    from support.topics import Log

AT = 1_700_000_000.5
OWN: Headers = [
    ("event-id", b"e\xff\x00"),
    ("twice", b"1"),
    ("twice", None),
    ("twice", b""),
    ("keylane-mine", b"m"),
]


FAILURES = (FailedAttempt(stage="answer", attempt=1, at=AT - 1, error="TimeoutError: 30 ms"),)


def because(**more: Any) -> FailureInfo:
    given: dict[str, Any] = {
        "stage": "answer",
        "error": "builtins.TimeoutError",
        "message": "no answer after 31 ms",
        "traceback": "Traceback …\nTimeoutError: no answer after 31 ms",
        "attempts": 2,
        "failed_at": AT,
        "failures": FAILURES,
    }
    return FailureInfo(**{**given, **more})


def letter(
    name: str,
    partition: int,
    offset: int,
    kind: DeadLetterKind = DeadLetterKind.DEAD,
    *,
    why: FailureInfo | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A letter to be produced."""
    message: dict[str, Any] = {"key": b"k%d" % partition, "value": b"\x00value %d" % offset}
    message |= {each: more.pop(each) for each in ("key", "value") if each in more}
    dead = None if more.pop("behind", False) else why or because()
    context = dead_letter_headers(
        name,
        "1.4",
        kind,
        identity(f"{name}.in").source,
        partition,
        offset,
        1_699_000_000_000 + offset,
        dead,
        **more,
    )
    return {**message, "partition": partition, "headers": [*OWN, *context]}


def keylane(log: Log, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "keylane", "dlq", *arguments, "--bootstrap", log.bootstrap]
    return subprocess.run(command, capture_output=True, timeout=30, check=False)


def facts(log: Log, *arguments: str) -> Any:
    done = keylane(log, *arguments, "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    return json.loads(done.stdout)


def test_letters_of_every_kind_are_read_back(log: Log, name: str) -> None:
    dlq = f"{name}.dlq"
    log.create(dlq, partitions=3)
    other = because(stage="check", error="shop.Refused", message="refused: order 7", failed_at=AT + 10)
    log.send(
        dlq,
        [
            letter(name, 0, 10),
            letter(name, 0, 11, why=because(message="no answer after 32 ms", failed_at=AT + 1), key=None),
            letter(name, 0, 10),  # the same again, after a crash
            {"partition": 0, "key": b"k", "value": b"not a letter"},
            letter(name, 1, 5, DeadLetterKind.PARKED, park=5, why=other),
            letter(name, 1, 6, DeadLetterKind.PARKED, park=5, behind=True, at=AT + 11),
            letter(name, 1, 9, DeadLetterKind.PARKED, park=5, behind=True, value=None),
            letter(name, 2, 1, DeadLetterKind.ARCHIVED, redrives=1, key=b"\xff\xfe"),
            {
                "partition": 2,
                "headers": [("keylane-app", b"x"), ("keylane-topic", b"t"), ("keylane-partition", b"?")],
            },
        ],
    )
    read = list(read_dead_letters(log.settings, dlq))
    found = {each.position: each for each in read if isinstance(each, DeadLetter)}
    wrong = {each.position: each.reason for each in read if isinstance(each, UnreadableDeadLetter)}
    assert sorted(found) == ["0@0", "0@1", "0@2", "1@0", "1@1", "1@2", "2@0"]
    assert wrong == {
        "0@3": "it has no header 'keylane-app': Keylane did not write it",
        "2@1": "its header 'keylane-partition' is '?', not a number",
    }
    first = found["0@0"]
    assert (first.key, first.value, first.headers) == (b"k0", b"\x00value 10", tuple(OWN))
    assert (first.stage, first.error, first.attempts, first.failed_at) == (
        "answer",
        "builtins.TimeoutError",
        2,
        AT,
    )
    assert first.failures == FAILURES
    assert (found["0@1"].key, found["1@2"].value) == (None, None)
    assert [found[at].park for at in ("1@0", "1@1", "1@2")] == [5, 5, 5]
    assert (found["1@1"].error, found["1@1"].failed_at, found["1@2"].failed_at) == (None, AT + 11, None)
    assert (found["2@0"].kind, found["2@0"].redrives) == (DeadLetterKind.ARCHIVED, 1)
    again = DeadLetterMessage(first)
    assert (again.topic(), again.partition(), again.offset()) == (f"{name}.in", 0, 10)
    assert (again.headers(), again.timestamp()) == (OWN, (1, 1_699_000_000_010))

    listed = facts(log, "list", name)
    assert (listed["letters"], listed["lanes"], listed["repeats"], listed["unreadable"]) == (6, 3, 1, 2)
    assert [(c["stage"], c["message"], c["count"], c["behind"], c["kinds"]) for c in listed["causes"]] == [
        ("check", "refused: order #", 3, 2, {"parked": 3}),
        ("answer", "no answer after # ms", 3, 0, {"dead": 2, "archived": 1}),
    ]
    cause = listed["causes"][0]
    assert (cause["first"], cause["last"], cause["example"], cause["example_source"]) == (
        AT + 10,
        AT + 11,
        "1@0",
        f"{name}.in/1@5",
    )
    assert facts(log, "list", name, "--kind", "archived", "--key", "hex:fffe")["letters"] == 1
    lines = facts(log, "list", name, "--letters", "--error", "Refused")["list"]
    assert {(line["position"], line["source"], line["behind"]) for line in lines} == {
        ("1@0", f"{name}.in/1@5", False),
        ("1@1", f"{name}.in/1@6", True),
        ("1@2", f"{name}.in/1@9", True),
    }

    shown = facts(log, "show", name, "--source", "0@10")
    assert (shown["position"], shown["also_at"], shown["source"]) == ("0@2", ["0@0"], f"{name}.in/0@10")
    assert shown == {**facts(log, "show", name, "0@2"), "also_at": ["0@0"]}
    assert shown["value_hex"] == b"\x00value 10".hex()
    assert shown["headers"][2] == {"name": "twice", "value": None}
    assert facts(log, "show", name, "2@1")["reason"] == wrong["2@1"]
    assert keylane(log, "show", name, "0@0", "--raw").stdout == b"\x00value 10"
    assert b"3 dead letters" not in keylane(log, "list", name).stdout
    assert not log.cluster.committed(f"{dlq}.reader", dlq, range(3))


def test_a_topic_is_read_whole_in_its_order_or_in_part(log: Log, name: str) -> None:
    dlq = f"{name}.dlq"
    log.create(dlq, partitions=3)
    log.send(dlq, [letter(name, n % 2, n) for n in range(4000)])  # nothing in partition 2
    reader = read_dead_letters(log.settings, dlq)
    log.send(dlq, [letter(name, 0, 9_999)])  # too late for this reader
    places: dict[int, list[int]] = {0: [], 1: []}
    for each in reader:
        places[each.partition].append(each.offset)
    assert places == {0: list(range(2000)), 1: list(range(2000))}
    part = read_dead_letters(log.settings, dlq, partitions=[0, 2], start={0: 1998, 2: 5}, end={0: 2000})
    assert [each.position for each in part] == ["0@1998", "0@1999"]
    dropped = read_dead_letters(log.settings, dlq)
    next(dropped)
    del dropped


def test_letters_are_read_by_their_offsets(log: Log, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dlq = f"{name}.dlq"
    log.create(dlq, partitions=1)
    log.send(
        dlq,
        [letter(name, 0, n) for n in range(1000)] + [{"partition": 0, "key": b"k", "value": b"no letter"}],
    )
    monkeypatch.setattr(dlq_reader, "_SEEK_OFFSETS", 100)
    offsets = [999, 0, 1, 50, 700, 1000, 5000]
    found = read_dead_letters_at(log.settings, dlq, 0, offsets)
    assert [(each.offset, each.source_offset) for each in found] == [(n, n) for n in (999, 0, 1, 50, 700)]


def test_letters_behind_an_open_transaction_are_waited_for(
    log: Log, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another task that shares the partition: a redrive must not miss what is in its transaction."""
    dlq = f"{name}.dlq"
    log.create(dlq, partitions=1)
    log.send(dlq, [letter(name, 0, 1)])
    producer: Any = Producer({"bootstrap.servers": log.bootstrap, "transactional.id": name})
    producer.init_transactions(10)
    producer.begin_transaction()
    producer.produce(dlq, **letter(name, 0, 2))
    producer.flush(10)
    log.send(dlq, [letter(name, 0, 3)])
    commit = threading.Timer(1.5, producer.commit_transaction, [10])
    commit.start()
    assert [each.offset for each in read_all_dead_letters(log.settings, dlq, 0)] == [0, 1, 2]
    commit.join()
    producer.begin_transaction()
    producer.produce(dlq, **letter(name, 0, 4))
    producer.flush(10)
    monkeypatch.setattr(dlq_reader, "SILENCE_SECONDS", 2.0)
    with pytest.raises(BrokerError, match="an open transaction begins at"):
        list(read_all_dead_letters(log.settings, dlq, 0))
    producer.abort_transaction(10)


def test_reader_ends_behind_final_transactions(log: Log, name: str) -> None:
    dlq = f"{name}.dlq"
    log.create(dlq, partitions=1)
    log.send(dlq, [letter(name, 0, 1)])
    producer: Any = Producer({"bootstrap.servers": log.bootstrap, "transactional.id": name})
    producer.init_transactions(10)
    for ended in (True, False):
        producer.begin_transaction()
        producer.produce(dlq, **letter(name, 0, 2))
        producer.flush(10)
        if ended:
            producer.abort_transaction(10)
        began = time.monotonic()
        assert [each.position for each in read_dead_letters(log.settings, dlq)] == ["0@0"]
        assert time.monotonic() - began < 5
    producer.abort_transaction(10)


def test_letters_from_the_spool_are_letters_as_all_others(log: Log, name: str, tmp_path: Path) -> None:
    dlq = f"{name}.dlq"
    log.create(dlq, partitions=2)
    spool = Spool(tmp_path, name, "c1")
    letters = [letter(name, n % 2, n) for n in range(600)]
    for each in letters[:300]:
        spool.append(
            SpooledDeadLetter(topic=dlq, timestamp=None, **{**each, "headers": tuple(each["headers"])})
        )
    spool.close()
    producer: Any = log.settings.producer()
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            producer.poll(0.05)

    def send(entry: SpooledDeadLetter) -> Future[None]:
        answer: Future[None] = Future()

        def report(error: Any, _message: Any) -> None:
            answer.set_exception(BrokerError(error.str())) if error else answer.set_result(None)

        producer.produce(
            entry.topic,
            entry.value,
            entry.key,
            entry.partition,
            on_delivery=report,
            timestamp=entry.timestamp or 0,
            headers=list(entry.headers),
        )
        return answer

    def refuse_the_last(entry: SpooledDeadLetter) -> Future[None]:
        if entry.value == b"\x00value 299":
            raise BrokerError("the broker is gone")
        return send(entry)

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        with pytest.raises(BrokerError, match="is gone"):
            spool.ship(refuse_the_last)
        assert spool.waiting() == 300
        assert spool.ship(send) == 300
    finally:
        ended.set()
        serving.join()
    assert spool.waiting() == 0
    read = [each for each in read_dead_letters(log.settings, dlq) if isinstance(each, DeadLetter)]
    repeats = SeenDeadLetters()
    once = [each for each in read if not repeats.seen(each)]
    assert len(read) == 599
    assert sorted(each.source_offset for each in once) == list(range(300))
    for partition in range(2):
        mine = [each.source_offset for each in once if each.partition == partition]
        assert mine == sorted(mine)
    assert all(each.headers == tuple(OWN) for each in once)


def test_a_mistake_is_one_sentence_and_exit_code_2(
    log: Log, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.create(f"{name}.dlq", partitions=1)
    for arguments, says in (
        (
            ["list", "nobody"],
            f"app 'nobody' has no dead letters: topic 'nobody.dlq' does not exist at {log.bootstrap}",
        ),
        (["show", name, "4@0"], f"topic '{name}.dlq' has no partition 4: the last one is 0"),
        (["show", name, "0@7"], f"no dead letter at {name}.dlq/0@7"),
        (["list", name, "--key", "k"], f"no dead letter of app '{name}' has the key k"),
    ):
        done = keylane(log, *arguments)
        assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
        assert done.stderr.decode().startswith(f"error: {says}")
    assert keylane(log, "list", name).stdout.decode() == f"0 dead letters of 0 lanes in {name}.dlq\n"
    monkeypatch.setattr("keylane.kafka.cluster.REQUEST_SECONDS", 0.5)
    with pytest.raises(BrokerError, match=r"no Kafka broker answered at 127\.0\.0\.1:1"):
        read_dead_letters(KafkaSettings("127.0.0.1:1"), "x.dlq")
