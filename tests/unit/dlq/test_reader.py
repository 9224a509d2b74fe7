from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from confluent_kafka import KafkaError as ClientError
from hypothesis import given
from hypothesis import strategies as st

from keylane.dlq import reader as letters
from keylane.dlq.headers import dead_letter_headers, parse
from keylane.dlq.reader import SeenDeadLetters, read_dead_letters
from keylane.dlq.record import DeadLetter, DeadLetterKind, DeadLetterMessage, UnreadableDeadLetter
from keylane.errors import BrokerError
from keylane.kafka.cluster import DEAD_LETTER_ROOM_BYTES
from keylane.policies.failure_info import FailedAttempt, FailureInfo
from keylane.testing import MemoryRecord
from support.state_log import identity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from keylane.kafka.settings import KafkaSettings
    from keylane.message import Headers, Record

pytestmark = pytest.mark.timeout(30)


def why(**more: Any) -> FailureInfo:
    given: dict[str, Any] = {
        "stage": "answer",
        "error": "builtins.TimeoutError",
        "message": "no answer after 31 ms",
        "traceback": "Traceback (most recent call last):\n  …\nTimeoutError",
        "attempts": 2,
        "failed_at": 1_700_000_000.1234,
        "failures": FAILURES,
    }
    return FailureInfo(**{**given, **more})


FAILURES = (
    FailedAttempt(stage="answer", attempt=1, at=1_699_999_999.5, error="TimeoutError: no answer after 30 ms"),
    FailedAttempt(
        stage="answer", attempt=2, at=1_700_000_000.123, error="TimeoutError: no answer after 31 ms"
    ),
)
OWN: Headers = [("event-id", b"e1"), ("trace", None), ("trace", b""), ("event-id", b"\xff\x00")]


def headers(
    kind: DeadLetterKind = DeadLetterKind.DEAD,
    *,
    failure: FailureInfo | None = None,
    park: int | None = None,
    redrives: int = 0,
    timestamp: int | None = 1_699_999_999_000,
    version: str | None = "1.4",
    behind: bool = False,
    **more: Any,
) -> Headers:
    dead = None if behind else failure or why()
    return dead_letter_headers(
        "chat", version, kind, identity().source, 3, 1042, timestamp, dead, park, redrives, **more
    )


def record(context: Headers, own: Headers | None = None, **more: Any) -> MemoryRecord:
    given: dict[str, Any] = {"topic": "chat.dlq", "partition": 3, "offset": 17, "key": b"k", "value": b"v"}
    return MemoryRecord(headers=[*(OWN if own is None else own), *context], **{**given, **more})


def letter(context: Headers, own: Headers | None = None, **more: Any) -> DeadLetter:
    found = parse(record(context, own, **more))
    assert isinstance(found, DeadLetter), found
    return found


def reason(context: Headers, own: Headers | None = None) -> str:
    found = parse(record(context, own))
    assert isinstance(found, UnreadableDeadLetter), found
    return found.reason


# -- written and read ----------------------------------------------------------------------------------------------


def test_a_letter_read_back_is_the_message_and_why_it_is_dead() -> None:
    found = letter(headers())
    assert found == DeadLetter(
        partition=3,
        offset=17,
        key=b"k",
        value=b"v",
        headers=tuple(OWN),
        headers_unreadable=None,
        topic="chat.in",
        topic_id="id-1",
        cluster="c1",
        source_partition=3,
        source_offset=1042,
        timestamp=1_699_999_999_000,
        kind=DeadLetterKind.DEAD,
        stage="answer",
        error="builtins.TimeoutError",
        message="no answer after 31 ms",
        traceback="Traceback (most recent call last):\n  …\nTimeoutError",
        attempts=2,
        failures=FAILURES,
        failed_at=1_700_000_000.123,
        park=None,
        redrives=0,
        app="chat",
        app_version="1.4",
    )
    assert (found.position, found.source) == ("3@17", "chat.in/3@1042")
    assert found.identity == identity().source


def test_app_is_the_first_header_and_unknown_ones_are_omitted() -> None:
    names = [name for name, _ in headers(version=None)]
    assert names[0] == "keylane-app"
    assert names[1:] == [
        "keylane-kind",
        "keylane-topic",
        "keylane-topic-id",
        "keylane-cluster",
        "keylane-partition",
        "keylane-offset",
        "keylane-timestamp",
        "keylane-attempts",
        "keylane-failed-at",
        "keylane-stage",
        "keylane-error",
        "keylane-message",
        "keylane-traceback",
        "keylane-failures",
    ]


def test_a_kind_may_be_given_by_its_name() -> None:
    context = dead_letter_headers("chat", None, "parked", identity().source, 3, 1042, None, why(), 1042)
    assert letter(context).kind is DeadLetterKind.PARKED


def test_message_parked_behind_another_has_no_own_error() -> None:
    context = headers(DeadLetterKind.PARKED, behind=True, park=1040, at=1_700_000_001.0)
    names = {name for name, _ in context}
    assert not names & {"keylane-stage", "keylane-error", "keylane-message", "keylane-traceback"}
    found = letter(context)
    assert (found.kind, found.park, found.attempts, found.failures) == (DeadLetterKind.PARKED, 1040, 0, ())
    assert (found.stage, found.error, found.message, found.traceback) == (None, None, None, None)
    assert found.failed_at == 1_700_000_001.0


@pytest.mark.parametrize(
    ("kind", "behind", "park"),
    [
        (DeadLetterKind.PARKED, False, None),
        (DeadLetterKind.DEAD, False, 7),
        (DeadLetterKind.DEAD, True, None),
    ],
)
def test_kind_park_and_failure_must_fit(kind: DeadLetterKind, behind: bool, park: int | None) -> None:
    with pytest.raises(ValueError, match="expected a park offset for parked dead letters only"):
        headers(kind, behind=behind, park=park)


def test_headers_of_the_message_that_look_like_ours_stay_its_own() -> None:
    own: Headers = [("keylane-topic", b"mine"), ("keylane-custom", b"x")]
    found = letter(headers(), own)
    assert (found.headers, found.topic) == (tuple(own), "chat.in")


def test_letter_republished_to_the_source_has_the_last_context() -> None:
    first = headers(version="old")
    again = letter(headers(redrives=1), [*OWN, *first])
    assert (again.app_version, again.redrives) == ("1.4", 1)
    assert again.headers == (*OWN, *first)


def test_letter_of_a_failed_redrive_has_one_context() -> None:
    own: Headers | None = OWN
    for redrives in range(3):
        found = letter(headers(redrives=redrives), own)
        own = list(DeadLetterMessage(found).headers() or ())
    assert own == OWN


def test_a_letter_of_version_0_1_is_dead() -> None:
    assert (
        letter([h for h in headers() if h[0] not in {"keylane-kind", "keylane-failures"}]).kind
        is DeadLetterKind.DEAD
    )


def test_a_message_whose_headers_could_not_be_read_says_so() -> None:
    found = letter(headers(unreadable="'utf-8' codec can't decode"), [])
    assert (found.headers, found.headers_unreadable) == ((), "'utf-8' codec can't decode")


any_text = st.text(st.characters(codec=None), max_size=300)  # lone surrogates too


@given(any_text, any_text, any_text, any_text, st.integers(0, 40))
def test_whatever_an_error_says_can_be_written_and_read(
    stage: str, error: str, message: str, traceback: str, failures: int
) -> None:
    tries = tuple(FailedAttempt(stage=stage, attempt=n, at=n / 7, error=error) for n in range(failures))
    dead = why(stage=stage, error=error, message=message, traceback=traceback, failures=tries)
    found = letter(headers(failure=dead))
    assert found.message == message.encode("utf-8", "replace").decode()
    assert [each.attempt for each in found.failures] == list(range(failures))[-20:]


@pytest.mark.parametrize("character", ["x", "\0", '"', "\\", "é", "\U0001f600", "\udc80"])
def test_the_context_stays_below_the_room_that_a_dead_letter_has(character: str) -> None:
    long = character * 100_000
    tries = tuple(FailedAttempt(stage=long, attempt=n, at=1e9, error=long) for n in range(50))
    dead = why(stage=long, error=long, message=long, traceback=long + "the end", failures=tries)
    context = headers(DeadLetterKind.PARKED, park=1042, failure=dead, unreadable=long, version="v" * 249)
    # As Kafka counts: two lengths of at most five bytes each.
    assert sum(len(name) + len(value or b"") + 10 for name, value in context) < DEAD_LETTER_ROOM_BYTES - 1000
    found = letter(context)
    assert found.traceback
    assert found.traceback.endswith("the end")
    assert found.failures[-1].attempt == 49
    assert len(found.failures) <= 20


# -- invalid letters -----------------------------------------------------------------------------------------------


def changed(**changes: str | bytes | None) -> Headers:
    """The context with some of its headers changed, or without them."""
    new = {f"keylane-{name.replace('_', '-')}": value for name, value in changes.items()}
    context = [h for h in headers(DeadLetterKind.PARKED, park=7) if h[0] not in new]
    return context + [(n, v.encode() if isinstance(v, str) else v) for n, v in new.items() if v is not None]


@pytest.mark.parametrize(
    ("context", "says"),
    [
        ([], "it has no header 'keylane-app': Keylane did not write it"),
        ([("keylane-app", None)], "'keylane-topic' is missing"),
        (changed(topic=None), "its header 'keylane-topic' is missing or empty"),
        (changed(topic=""), "its header 'keylane-topic' is missing or empty"),
        (changed(partition=None), "its header 'keylane-partition' is missing"),
        (changed(offset="x"), "its header 'keylane-offset' is 'x', not a number"),
        (changed(offset="-1"), "not a number"),
        (changed(offset="٣"), "not a number"),
        (changed(offset="9" * 5000), "9…', not a number"),
        (changed(offset=b"\xff"), r"is '\\xff', not a number"),
        (changed(timestamp="soon"), "'keylane-timestamp' is 'soon'"),
        (changed(kind="lost"), "its header 'keylane-kind' is 'lost', not one of dead, archived, parked"),
        (changed(park=None), "its header 'keylane-park' is missing"),
        (changed(failed_at="nan"), "not a time in seconds"),
        (changed(redrives=""), "its header 'keylane-redrives' is '', not a number"),
        (changed(failures="{"), "not a list of attempts as JSON"),
        (changed(failures="[" * 100_000), "not a list of attempts as JSON"),
        (changed(failures="[1]"), "not a list of attempts as JSON"),
        (changed(failures='[{"stage": 1, "attempt": 1, "at": 1, "error": ""}]'), "not a list of attempts"),
        (changed(failures='[{"stage": "", "attempt": true, "at": 1, "error": ""}]'), "not a list of attempts"),
        (changed(failures='[{"stage": "", "attempt": 1, "at": NaN, "error": ""}]'), "not a list of attempts"),
        (changed(failures='[{"stage": "", "attempt": 1, "at": 1%s, "error": ""}]' % ("0" * 400)), "not a list"),
    ],
)  # fmt: skip
def test_invalid_letter_names_its_problem(context: Headers, says: str) -> None:
    assert says in reason(context)


def test_invalid_letter_keeps_its_content() -> None:
    found = parse(record([], [("a", b"b")]))
    assert isinstance(found, UnreadableDeadLetter)
    assert (found.position, found.key, found.value, found.headers) == ("3@17", b"k", b"v", (("a", b"b"),))


class Mangled(MemoryRecord):
    def headers(self) -> Any:
        return b"\xff".decode()


def test_header_with_a_binary_name_makes_an_invalid_letter() -> None:
    found = parse(Mangled(topic="t", partition=0, offset=0, key=None, value=None))
    assert isinstance(found, UnreadableDeadLetter)
    assert "the name of a header is not UTF-8" in found.reason
    assert found.headers is None


names = st.sampled_from([name for name, _ in headers(DeadLetterKind.PARKED, park=1, redrives=1)])
values = (
    st.none() | st.binary(max_size=40) | st.sampled_from([b"1", b"parked", b"dead", b"[]", b"[{}]", b"{}"])
)


@given(st.lists(st.tuples(names | st.text(max_size=5), values), max_size=20))
def test_garbage_never_raises(garbage: Headers) -> None:
    assert parse(record(garbage, [])).position == "3@17"


# -- run again, and told apart -------------------------------------------------------------------------------------


def test_a_letter_is_the_record_that_it_was() -> None:
    original: Record = DeadLetterMessage(letter(headers()))
    assert (original.topic(), original.partition(), original.offset()) == ("chat.in", 3, 1042)
    assert (original.key(), original.value(), original.timestamp()) == (b"k", b"v", (1, 1_699_999_999_000))
    assert original.headers() == OWN


def test_letter_without_headers_and_timestamp_is_read() -> None:
    original = DeadLetterMessage(letter(headers(timestamp=None), [], key=None, value=None))
    assert (original.headers(), original.timestamp()) == (None, (0, 0))
    assert (original.key(), original.value()) == (None, None)


def test_repeated_letter_has_the_same_redrives_and_outcome() -> None:
    repeats = SeenDeadLetters()
    assert not repeats.seen(letter(headers()))
    assert repeats.seen(letter(headers(), offset=18))
    assert not repeats.seen(letter(headers(redrives=1), offset=19))
    assert repeats.seen(letter(headers(redrives=1), offset=20))
    assert not repeats.seen(letter(headers(DeadLetterKind.ARCHIVED), offset=21))


@pytest.mark.parametrize("header", ["keylane-topic", "keylane-topic-id", "keylane-cluster"])
def test_a_message_of_another_topic_is_no_repeat(header: str) -> None:
    repeats = SeenDeadLetters()
    assert not repeats.seen(letter(headers()))
    other = [(name, b"other" if name == header else value) for name, value in headers()]
    assert not repeats.seen(letter(other, offset=18))


def test_a_letter_of_a_recreated_topic_is_no_repeat() -> None:
    """Its message has the offset, but is another one: as a repeat it would count as redriven and never run."""
    repeats = SeenDeadLetters()
    former = letter(headers())
    assert not repeats.seen(former)
    assert not repeats.seen(replace(former, topic_id="id-2", offset=18))


# -- reading the topic ---------------------------------------------------------------------------------------------


@dataclass
class Reply(MemoryRecord):
    """A message or an error, as the client hands it out."""

    place: tuple[int, int]
    failed: ClientError | None = None

    def partition(self) -> int:
        return self.place[0]

    def offset(self) -> int:
        return self.place[1]

    def error(self) -> ClientError | None:
        return self.failed

    def key(self) -> bytes | None:
        return None

    value = key

    def headers(self) -> Any:
        return None


def eof(partition: int, offset: int = 0) -> Reply:
    return Reply((partition, offset), ClientError(ClientError._PARTITION_EOF))


@dataclass
class Client:
    """Settings, cluster and consumer at once: a topic with replies."""

    replies: list[Reply | None] = field(default_factory=list)
    ending: dict[int, int] = field(default_factory=lambda: {0: 2, 1: 0, 2: 3})
    beginning: dict[int, int] = field(default_factory=dict)
    bootstrap: str = "here:1"
    group: str = ""
    assigned: dict[int, int] = field(default_factory=dict)
    paused: list[int] = field(default_factory=list)
    closed: int = 0

    def topics(self) -> dict[str, int]:
        return {"chat.dlq": len(self.ending)}

    def ends(self, topic: str, partitions: Iterable[int], *, earliest: bool = False) -> dict[int, int]:
        return {p: self.beginning.get(p, 0) if earliest else self.ending[p] for p in partitions}

    def consumer(self, group: str, **more: Any) -> Client:
        self.group = group
        return self

    def list_topics(self, topic: str, timeout: float) -> SimpleNamespace:
        return SimpleNamespace(topics={})

    def assign(self, places: list[Any]) -> None:
        self.assigned = {place.partition: place.offset for place in places}

    def pause(self, places: list[Any]) -> None:
        self.paused += [place.partition for place in places]

    def poll(self, timeout: float) -> Reply | None:
        return self.replies.pop(0) if self.replies else None

    def consume(self, count: int, timeout: float) -> list[Reply]:
        found = []
        while self.replies and self.replies[0] is not None:
            found.append(cast("Reply", self.replies.pop(0)))
        return found

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    client = Client()
    monkeypatch.setattr(letters, "Cluster", lambda settings: settings)
    monkeypatch.setattr(letters, "SILENCE_SECONDS", 0.05)
    return client


def read(client: Client, topic: str = "chat.dlq", **more: Any) -> list[str]:
    return [each.position for each in read_dead_letters(cast("KafkaSettings", client), topic, **more)]


def test_every_partition_is_read_to_its_end_as_of_the_beginning(client: Client) -> None:
    client.replies = [Reply((0, 0)), None, *(Reply((2, n)) for n in range(5)), Reply((0, 1)), Reply((0, 2))]
    assert read(client) == ["0@0", "2@0", "2@1", "2@2", "0@1"]
    assert (client.assigned, client.paused, client.closed) == ({0: 0, 2: 0}, [2, 0], 1)
    assert client.group == "chat", "a group on which the app has rights"


def test_partition_with_invisible_final_records_ends(client: Client) -> None:
    client.replies = [Reply((0, 0)), eof(0), Reply((2, 0)), eof(2)]
    assert read(client) == ["0@0", "2@0"]


def test_offsets_can_be_narrowed_down(client: Client) -> None:
    client.beginning = {2: 1}
    client.replies = [Reply((2, 1)), Reply((2, 2))]
    assert read(client, partitions=[2], start={2: 0}, end={2: 2}) == ["2@1"]
    assert client.assigned == {2: 1}


@pytest.mark.parametrize("more", [{"partitions": [1]}, {"partitions": []}, {"start": {0: 9, 2: 3}}])
def test_nothing_to_read_makes_no_consumer(client: Client, more: dict[str, Any]) -> None:
    assert read(client, **more) == []
    assert client.closed == 0


def test_app_without_dead_letters_is_reported_at_once(client: Client) -> None:
    with pytest.raises(
        BrokerError, match=r"app 'shop' has no dead letters: topic 'shop\.dlq' does not exist at here:1"
    ):
        read_dead_letters(cast("KafkaSettings", client), "shop.dlq")
    with pytest.raises(BrokerError, match=r"^topic 'shop' does not exist"):
        read_dead_letters(cast("KafkaSettings", client), "shop")


def test_missing_partition_is_reported_at_once(client: Client) -> None:
    with pytest.raises(BrokerError, match=r"'chat\.dlq' has no partition 3: the last one is 2"):
        read_dead_letters(cast("KafkaSettings", client), "chat.dlq", partitions=[0, 3])


def test_silent_broker_error_quotes_its_last_complaint(client: Client) -> None:
    client.replies = [Reply((0, 0)), Reply((-1, -1), ClientError(ClientError._ALL_BROKERS_DOWN)), None]
    with pytest.raises(
        BrokerError, match=r"'chat\.dlq' was not read to its end: nothing came for 0.05 s \(.*All broker"
    ):
        read(client)
    assert client.closed == 1


def test_a_topic_that_may_not_be_read_is_an_error(client: Client) -> None:
    client.replies = [Reply((0, 0), ClientError(ClientError.TOPIC_AUTHORIZATION_FAILED))]
    with pytest.raises(BrokerError, match=r"topic 'chat\.dlq' cannot be read: .*[Aa]uthorization"):
        read(client)
    assert client.closed == 1


def test_a_reader_that_is_dropped_lets_go_of_its_consumer(client: Client) -> None:
    client.replies = [Reply((0, 0)), Reply((0, 1))]
    reader = read_dead_letters(cast("KafkaSettings", client), "chat.dlq")
    next(reader)
    assert client.closed == 0
    del reader
    assert client.closed == 1


def test_failures_are_json_that_anyone_can_read() -> None:
    (text,) = [value for name, value in headers() if name == "keylane-failures"]
    assert json.loads(text or b"")[0] == {
        "stage": "answer",
        "attempt": 1,
        "at": 1_699_999_999.5,
        "error": "TimeoutError: no answer after 30 ms",
    }
