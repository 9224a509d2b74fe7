from __future__ import annotations

import json
import socket
from collections import Counter
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import pytest
import typer
from confluent_kafka import Consumer, Producer, TopicPartition
from typer.testing import CliRunner

from keylane.cli.seed import seed as command
from keylane.demo import seed as module
from keylane.demo.seed import (
    Distribution,
    SeedLoad,
    Target,
    Value,
    ensure_topic,
    parse_value,
    picks,
    records,
    send,
)
from keylane.errors import BrokerError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator


def made(load: SeedLoad) -> list[tuple[bytes, bytes, bytes]]:
    return list(records(load, lambda number: 1_000_000 + number))


# -- messages ------------------------------------------------------------------------------------------------------


def test_seed_value_has_its_facts_and_the_given_size() -> None:
    load = SeedLoad(messages=50, keys=3, value_size=77, seed=5)
    sequences: Counter[bytes] = Counter()
    for number, (key, value, event_id) in enumerate(made(load)):
        assert len(value) == 77
        assert event_id == f"5-{number}".encode()
        assert parse_value(value) == Value(sequences[key], 1_000_000 + number, f"5-{number}")
        sequences[key] += 1
    assert set(sequences) == {b"k0", b"k1", b"k2"}


def test_value_has_the_documented_format() -> None:
    ((key, value, _),) = made(SeedLoad(messages=1, keys=1, value_size=40, seed=7))
    assert key == b"k0"
    assert value == b"0|1000000|7-0|" + b"x" * 26


def test_seed_decides_the_messages() -> None:
    load = SeedLoad(messages=200, keys=10, seed=1)
    assert made(load) == made(load)
    other = made(SeedLoad(messages=200, keys=10, seed=2))
    assert [key for key, _, _ in made(load)] != [key for key, _, _ in other]
    assert not {event_id for _, _, event_id in made(load)} & {event_id for _, _, event_id in other}


def test_the_choice_of_keys_is_the_same_in_every_python() -> None:
    assert list(islice(picks(SeedLoad(keys=100, seed=42)), 8)) == [63, 2, 27, 22, 73, 67, 89, 8]
    zipf = SeedLoad(keys=100, seed=42, dist=Distribution.ZIPF)
    assert list(islice(picks(zipf), 8)) == [10, 0, 1, 0, 18, 13, 49, 0]


def test_uniform_keys_are_equally_likely() -> None:
    counts = Counter(islice(picks(SeedLoad(keys=10)), 50_000))
    assert len(counts) == 10
    assert all(4_600 < count < 5_400 for count in counts.values())


@pytest.mark.parametrize("s", [0.5, 1.0, 1.5])
def test_zipf_keys_fall_off_with_their_rank(s: float) -> None:
    counts = Counter(islice(picks(SeedLoad(keys=50, dist=Distribution.ZIPF, zipf_s=s)), 100_000))
    total = sum(rank**-s for rank in range(1, 51))
    for rank in (1, 2, 5, 20, 50):
        expected = 100_000 * rank**-s / total
        assert abs(counts[rank - 1] - expected) < 5 * expected**0.5
    assert max(counts) <= 49


def test_a_key_count_of_one_is_one_lane() -> None:
    for dist in Distribution:
        assert set(islice(picks(SeedLoad(keys=1, dist=dist)), 100)) == {0}


@pytest.mark.parametrize("value", [b"", b"1|2", b"a|2|id|x", b"1|b|id|x"])
def test_another_value_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a value|invalid literal"):
        parse_value(value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"messages": -1}, "messages must be at least 0, not -1"),
        ({"keys": 0}, "keys must be at least 1, not 0"),
        ({"seed": -2}, "seed must be at least 0, not -2"),
        ({"zipf_s": 0}, "zipf-s must be a number above 0"),
        ({"zipf_s": float("nan")}, "zipf-s must be a number above 0"),
        ({"value_size": 28}, "value-size 28 is too small: .* of 10000 messages need up to 29 bytes"),
    ],
)
def test_numbers_that_cannot_work_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        SeedLoad(**settings)


def test_the_smallest_value_size_holds_the_longest_head() -> None:
    with pytest.raises(SettingsError) as refused:
        SeedLoad(messages=1000, keys=1, value_size=1)
    smallest = int(str(refused.value).split()[-2])
    last = list(records(SeedLoad(messages=1000, keys=1, value_size=smallest), lambda _: 10**16 - 1))[-1]
    assert len(last[1]) == smallest


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "ä", "a/b", "x" * 250, "a\n"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="expected a topic name"):
        Target(topic=name, bootstrap="localhost:9092")


@pytest.mark.parametrize("field", ["partitions", "replication", "rate"])
def test_a_target_that_cannot_work_is_refused(field: str) -> None:
    with pytest.raises(SettingsError, match=field):
        Target(topic="t", bootstrap="localhost:9092", **{field: -1})  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="no broker"):
        Target(topic="t", bootstrap=" ")


# -- sending: against the broker that is built into the client library, which has no admin requests ----------------


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    owner = Producer({"bootstrap.servers": "-", "test.mock.num.brokers": 1, "log_level": 0})
    owner.list_topics("there", timeout=10)  # asked for by name, it makes the topic: 4 partitions
    (broker,) = owner.list_topics(timeout=10).brokers.values()
    yield f"{broker.host}:{broker.port}"
    del owner


def consume(bootstrap: str, topic: str, seed: int, count: int) -> list[Any]:
    settings = {
        "bootstrap.servers": bootstrap,
        "group.id": "g",
        "auto.offset.reset": "earliest",
        "log_level": 0,
    }
    consumer = Consumer(settings)
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(4)])
    found: list[Any] = []
    while len(found) < count:
        message = consumer.poll(10)
        assert message is not None, f"only {len(found)} of {count} arrived"
        assert message.error() is None
        if parse_value(message.value() or b"").event_id.startswith(f"{seed}-"):
            found.append(message)
    consumer.close()
    return found


def test_everything_sent_arrives_in_the_order_of_its_key(bootstrap: str) -> None:
    told: list[int] = []
    load = SeedLoad(messages=5_000, keys=50, seed=11)
    report = send(load, Target(topic="there", bootstrap=bootstrap), told.append)
    assert (report.messages, report.partitions, report.created, report.seed) == (5_000, 4, False, 11)
    assert told[-1] == 5_000
    sequences: Counter[bytes] = Counter()
    homes: dict[bytes, int] = {}
    for message in consume(bootstrap, "there", 11, 5_000):
        value = parse_value(message.value())
        assert value.sequence == sequences[message.key()]
        assert message.headers() == [("event-id", value.event_id.encode())]
        assert homes.setdefault(message.key(), message.partition()) == message.partition()
        sequences[message.key()] += 1
    # As Java's murmur2 has it: (murmur2(key) & 0x7fffffff) % 4
    assert {key: homes[key] for key in (b"k0", b"k1", b"k2", b"k3")} == {
        key: (_murmur2(key) & 0x7FFFFFFF) % 4 for key in (b"k0", b"k1", b"k2", b"k3")
    }


def test_a_rate_is_kept_and_due_times_are_even(bootstrap: str) -> None:
    load = SeedLoad(messages=100, keys=5, seed=12, event_ids=False)
    report = send(load, Target(topic="there", bootstrap=bootstrap, rate=500))
    assert report.seconds >= 0.19
    messages = consume(bootstrap, "there", 12, 100)
    assert all(message.headers() is None for message in messages)
    due = sorted(parse_value(message.value()).due_us for message in messages)
    assert {later - earlier for earlier, later in pairwise(due)} == {2_000}


def test_an_existing_topic_keeps_its_partitions(bootstrap: str) -> None:
    assert ensure_topic(Target(topic="there", bootstrap=bootstrap, partitions=4)) == (4, False)
    with pytest.raises(SettingsError, match="topic there has 4 partitions, not 3: leave the number out"):
        ensure_topic(Target(topic="there", bootstrap=bootstrap, partitions=3))


def test_a_setting_that_the_client_does_not_know_is_refused(bootstrap: str) -> None:
    with pytest.raises(SettingsError, match=r'No such configuration property: "no\.such"'):
        ensure_topic(Target(topic="there", bootstrap=bootstrap, client={"no.such": "1"}))


def test_seed_without_a_broker_fails_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BROKER_SECONDS_MAX", 0.5)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(BrokerError, match=rf"no broker answers at {nowhere}.*keylane broker start"):
            send(SeedLoad(messages=1), Target(topic="t", bootstrap=nowhere))


def _murmur2(data: bytes) -> int:
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    h = 0x9747B28C ^ len(data)
    whole = len(data) & ~3
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        h = (h * m ^ ((k ^ k >> 24) * m)) & mask
    if len(data) > whole:
        h = (h ^ int.from_bytes(data[whole:], "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(command)
    return app


def test_the_command_prints_one_line_or_one_json_value(app: typer.Typer, bootstrap: str) -> None:
    arguments = ["there", "--bootstrap", bootstrap, "--messages", "10", "--keys", "3", "--seed", "4"]
    text = CliRunner().invoke(app, arguments)
    assert text.exit_code == 0
    assert text.stdout.startswith("there (4 partitions): 10 messages, 3 keys, seed 4, in ")
    assert text.stdout.count("\n") == 1
    as_json = CliRunner().invoke(app, [*arguments, "--json"])
    facts = json.loads(as_json.stdout)
    assert (facts["topic"], facts["messages"], facts["keys"], facts["seed"]) == ("there", 10, 3, 4)


def test_the_broker_can_come_from_the_environment(app: typer.Typer, bootstrap: str) -> None:
    done = CliRunner().invoke(app, ["there", "--messages", "1"], env={"KEYLANE_BOOTSTRAP": bootstrap})
    assert done.exit_code == 0, done.output


def test_a_terminal_gets_a_progress_bar(
    app: typer.Typer, bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keylane.cli.seed._on_a_terminal", lambda: True)
    done = CliRunner().invoke(app, ["there", "--bootstrap", bootstrap, "--messages", "10"])
    assert done.exit_code == 0
    assert "10 messages" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bad topic"], "hyphens, got 'bad topic'"),
        (["t", "--value-size", "5"], "value-size 5 is too small"),
        (["t", "--zipf-s", "-1"], "zipf-s must be a number above 0"),
        (["t", "--rate", "inf"], "rate must be 0"),
        (["t", "-o", "nonsense"], "--option: expected kafka.NAME=VALUE"),
        (["t", "-o", "kafka.no.such=1"], "No such configuration property"),
        (["there", "--partitions", "7"], "topic there has 4 partitions, not 7"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    app: typer.Typer, bootstrap: str, arguments: list[str], says: str
) -> None:
    done = CliRunner().invoke(app, [*arguments, "--bootstrap", bootstrap])
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.startswith("keylane: ")
    assert done.stderr.count("\n") == 1
    assert not done.stdout
