from __future__ import annotations

import json
import shlex
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from keylane.cli import dlq
from keylane.cli.arguments import moment, place
from keylane.cli.main import app, main
from keylane.dlq.record import DeadLetter, DeadLetterKind, ExpectedOrigin, UnreadableDeadLetter
from keylane.dlq.summary import CAUSES_MAX, OTHERS, DeadLetterFilter, DeadLetterSummary, normalised
from keylane.errors import KeylaneError, SettingsError
from keylane.key_text import key_argument, parse_key, printable, show_key
from keylane.offsets.identity import TopicIdentity
from keylane.policies.failure_info import FailedAttempt
from keylane.safe_text import show_bytes
from keylane.state.admin import KnownDeadLetters

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(20)

NOW = 1_700_000_000.0


def letter(offset: int = 0, **more: Any) -> DeadLetter:
    given: dict[str, Any] = {
        "partition": 1,
        "offset": offset,
        "key": b"k1",
        "value": b'{"text": "hello"}',
        "headers": (("event-id", b"e1"), ("binary", b"\xff\x00"), ("nothing", None)),
        "headers_unreadable": None,
        "topic": "chat.in",
        "topic_id": "id-1",
        "cluster": "c1",
        "source_partition": 1,
        "source_offset": 100 + offset,
        "timestamp": 1_699_999_990_000,
        "kind": DeadLetterKind.DEAD,
        "stage": "answer",
        "error": "builtins.TimeoutError",
        "message": f"no answer after {offset} ms",
        "traceback": "Traceback (most recent call last):\n  File …\nTimeoutError: no answer",
        "attempts": 2,
        "failures": (FailedAttempt(stage="answer", attempt=1, at=NOW - 1, error="TimeoutError: no answer"),),
        "failed_at": NOW + offset,
        "park": None,
        "redrives": 0,
        "app": "chat",
        "app_version": "1.4",
    }
    return DeadLetter(**{**given, **more})


def parked(offset: int, park: int, *, behind: bool = True, **more: Any) -> DeadLetter:
    why = (
        {"stage": None, "error": None, "message": None, "traceback": None, "failed_at": None}
        if behind
        else {}
    )
    return letter(offset, kind=DeadLetterKind.PARKED, park=park, **{**why, **more})


def rubbish(offset: int = 0, **more: Any) -> UnreadableDeadLetter:
    given: dict[str, Any] = {"key": None, "value": b"junk", "headers": (("a", b"b"),)}
    return UnreadableDeadLetter(
        partition=0, offset=offset, reason="it has no header 'keylane-app'", **{**given, **more}
    )


def survey(
    *letters: DeadLetter | UnreadableDeadLetter, redriven: dict[int, set[int]] | None = None, **more: Any
) -> DeadLetterSummary:
    options = {name: more.pop(name) for name in ("every", "keep") if name in more}
    made = DeadLetterSummary(DeadLetterFilter(**more), redriven or {}, **options)
    for each in letters:
        made.add(each)
    return made


# -- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        (b"user-17", "user-17"),
        ("zoë".encode(), "zoë"),
        (b"two words", "two words"),
        (b"\xff\x00", "hex:ff00"),
        (b"a\nb", "hex:610a62"),
        (b" a", "hex:2061"),
        (b"", "hex:"),
        (b"hex:41", "hex:6865783a3431"),
        (b"-", "hex:2d"),
        (None, "-"),
    ],
)
def test_readable_key_is_shown_as_text(key: bytes | None, shown: str) -> None:
    assert show_key(key) == shown


@given(st.binary(max_size=20) | st.text(st.characters(codec="utf-8"), max_size=9).map(str.encode))
def test_a_key_that_is_shown_can_be_given_back(key: bytes) -> None:
    assert parse_key(show_key(key)) == key
    assert parse_key(show_bytes(key)) == key


def test_a_key_that_the_shell_could_not_decode_is_its_bytes() -> None:
    assert parse_key("\udcff") == b"\xff"


@pytest.mark.parametrize("text", ["hex:f", "hex:zz", "hex:0x00"])
def test_hex_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"expected hex digits after 'hex:'"):
        parse_key(text)


def test_text_that_would_move_the_cursor_is_shown_escaped() -> None:
    assert printable("a\x1b[2Jé\r") == r"a\x1b[2Jé\r"


@pytest.mark.parametrize(
    ("key", "typed"),
    [
        (b"user-17", "user-17"),
        (b"two words", "'two words'"),
        (b"-x", "hex:2d78"),
        (b"it's", """'it'"'"'s'"""),
        (b"", "hex:"),
    ],
)
def test_a_key_is_typed_so_that_a_shell_hands_it_on(key: bytes, typed: str) -> None:
    assert key_argument(key) == typed
    assert parse_key(shlex.split(typed)[0]) == key


# -- causes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("timeout after 31 ms", "timeout after 32.5 ms"),
        ("no such order 0xdeadBEEF", "no such order 0x1"),
        ("request 9f1c0e2a4b7d failed", "request 0a1b2c3d4e5f failed"),
        ("id 3f2504e0-4f89-41d3-9a0c-0305e82c3301", "id 6ba7b810-9dad-11d1-80b4-00c04fd430c8"),
        ("10.0.0.1:9092 refused", "10.0.0.27:9093 refused"),
        ("at line 1\n  column 2", "at line 30 column 400"),
    ],
)
def test_messages_that_differ_in_numbers_are_one_cause(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)


def test_messages_that_differ_in_words_are_not() -> None:
    assert normalised("bad face value") == "bad face value"
    assert normalised("deadbeef defaced") == "deadbeef defaced"
    assert len(normalised("x" * 9000)) == 300


def test_dlq_list_groups_by_cause_most_frequent_first() -> None:
    made = survey(
        letter(0, message="no answer after 1 ms", key=b"a"),
        letter(1, error="shop.Refused", message="refused"),
        letter(2, message="no answer after 2 ms", key=b"b"),
        letter(3, message="no answer after 3 ms", key=b"b"),
        letter(4, message="no answer after 3 ms", key=None, stage="check"),
    )
    groups = made.groups()
    assert [(g.cause.stage, g.cause.error, g.count) for g in groups] == [
        ("answer", "builtins.TimeoutError", 3),
        ("check", "builtins.TimeoutError", 1),
        ("answer", "shop.Refused", 1),
    ]
    first = groups[0]
    assert (first.lanes, first.first, first.last, first.kinds) == (2, NOW, NOW + 3, {"dead": 3})
    assert first.example is not None
    assert first.example.position == "1@3"
    assert (made.letters, made.lanes) == (5, 3)


def test_messages_parked_behind_another_have_its_cause() -> None:
    made = survey(
        parked(0, 100, behind=False),
        parked(1, 100),
        letter(2),
        parked(3, 100),
        parked(4, 77),
        parked(5, 100, source_partition=2),  # another partition's park
    )
    head, unknown = made.groups()
    assert (head.count, head.behind, head.kinds) == (4, 2, {"parked": 3, "dead": 1})
    assert (unknown.cause.error, unknown.count, unknown.behind) == (None, 2, 2)
    assert head.example is not None
    assert head.example.position == "1@2"
    assert survey(parked(0, 100, behind=False), parked(1, 100), stage="answer").letters == 2


def test_repeated_letter_counts_once() -> None:
    made = survey(letter(0), letter(1, source_offset=100), letter(2, source_offset=100, redrives=1))
    assert (made.letters, made.repeats) == (2, 1)


def test_dlq_list_hides_redriven_letters_unless_all() -> None:
    both = (letter(0), letter(1))
    made = survey(*both, redriven={1: {0}}, keep=9)
    assert (made.letters, made.redriven, [line.position for line in made.lines()]) == (1, 1, ["1@1"])
    made = survey(*both, redriven={1: {0}}, keep=9, every=True)
    assert [(line.position, line.redriven) for line in made.lines()] == [("1@0", True), ("1@1", False)]


def test_letters_are_listed_in_lane_order() -> None:
    first = [parked(n, 100, failed_at=None) for n in (1, 2)]
    made = survey(
        parked(0, 100, behind=False, failed_at=NOW),
        *first,
        letter(3, source_offset=99, failed_at=NOW + 9),
        letter(4, key=b"other", failed_at=NOW + 20),
        keep=9,
    )
    assert [line.source for line in made.lines()][:1] == ["chat.in/1@104"]
    assert [line.source_offset for line in made.lines()][1:] == [99, 100, 101, 102]


def test_dlq_list_hides_repeats_of_redriven_letters() -> None:
    made = survey(letter(0), letter(1, source_offset=100), redriven={1: {0}})
    assert (made.letters, made.redriven, made.repeats) == (0, 1, 1)


@pytest.mark.parametrize(
    ("selection", "taken"),
    [
        ({"key": b"k1"}, [0, 1]),
        ({"stage": "check"}, [2]),
        ({"error": "TimeoutError"}, [0, 2]),
        ({"error": "builtins.TimeoutError"}, [0, 2]),
        ({"error": "Error"}, []),
        ({"since": NOW + 1}, [1, 2]),
        ({"until": NOW + 1}, [0]),
        ({"since": NOW, "until": NOW + 2}, [0, 1]),
        ({"kind": DeadLetterKind.ARCHIVED}, [1]),
        ({"kind": DeadLetterKind.ARCHIVED, "stage": "check"}, []),
    ],
)
def test_letters_can_be_selected(selection: dict[str, Any], taken: list[int]) -> None:
    letters = (
        letter(0),
        letter(1, error="shop.Refused", kind=DeadLetterKind.ARCHIVED),
        letter(2, stage="check", key=b"k2"),
    )
    made = survey(*letters, keep=9, **selection)
    assert sorted(int(line.position.partition("@")[2]) for line in made.lines()) == taken


def test_letter_without_a_time_matches_no_period() -> None:
    assert survey(parked(0, 7)).letters == 1
    assert survey(parked(0, 7), since=0.0).letters == 0
    assert survey(parked(0, 7), until=NOW * 2).letters == 0


@pytest.mark.timeout(180)
def test_survey_of_many_letters_takes_little_memory() -> None:
    """Each of another lane, every tenth of them twice."""
    made = DeadLetterSummary(DeadLetterFilter(), {})
    made.add(letter(0, key=b"key-0"))
    before = sys.getallocatedblocks()
    for number in range(1, 100_000):
        made.add(letter(number, key=b"key-%d" % number))
        if number % 10 == 0:
            made.add(letter(1_000_000 + number, key=b"key-%d" % number, source_offset=100 + number))
    grown = sys.getallocatedblocks() - before
    assert (made.letters, made.lanes, made.repeats) == (100_000, 100_000, 9_999)
    assert [group.lanes for group in made.groups()] == [100_000]
    assert grown < 1000


def test_summary_distinguishes_only_some_thousand_causes() -> None:
    made = survey(*(letter(number, message="x" * number) for number in range(300)))
    assert len(made.groups()) == 300
    made = DeadLetterSummary(DeadLetterFilter(), {})
    for number in range(CAUSES_MAX + 50):
        made.add(letter(number, error=f"e{number}"))
    assert made.letters == sum(group.count for group in made.groups()) == CAUSES_MAX + 50
    assert made.groups()[0].cause == OTHERS
    assert made.groups()[0].count == 50


def test_only_the_newest_are_kept_however_many_there_are() -> None:
    made = survey(*(letter(n, failed_at=NOW + n % 7) for n in range(1000)), keep=3)
    assert [line.at for line in made.lines()] == [NOW + 6] * 3
    assert made.letters == 1000


# -- times and places ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("2h", 7200), ("1.5h", 5400), ("7d", 604_800), ("2w", 1_209_600)],
)
def test_so_long_ago_is_a_time(text: str, seconds: float) -> None:
    assert moment(text, NOW, "--since") == NOW - seconds


def test_a_time_is_local_unless_it_says_otherwise() -> None:
    at = datetime(2026, 11, 16, 10, 0, tzinfo=UTC)
    assert moment("2026-11-16T10:00Z", NOW, "--since") == at.timestamp()
    assert moment("2026-11-16T11:00+01:00", NOW, "--since") == at.timestamp()
    local = datetime(2026, 11, 16, 10, 0).astimezone()
    assert moment("2026-11-16T10:00", NOW, "--since") == local.timestamp()
    assert moment("2026-11-16", NOW, "--since") == (local - timedelta(hours=10)).timestamp()


@pytest.mark.parametrize(
    "text", ["", "2", "h", "-2h", "2 h", "2y", "yesterday", "2026-13-01", "inf", "1e9s", "٣h"]
)
def test_invalid_time_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--since: expected an age \(30m, 2h, 7d\) or a time"):
        moment(text, NOW, "--since")


def test_a_position_is_a_partition_and_an_offset() -> None:
    assert place("3@17") == (3, 17)


@pytest.mark.parametrize("text", ["", "3", "3/", "/17", "a/b", "-1/2", "1/2/3", "1/" + "9" * 30, "٣/1"])
def test_invalid_position_is_refused(text: str) -> None:
    with pytest.raises(
        SettingsError, match=r"expected a position PARTITION@OFFSET, such as 3@17 or chat\.dlq/3@17, got "
    ):
        place(text)


# -- the commands --------------------------------------------------------------------------------------------------

Read = list[DeadLetter | UnreadableDeadLetter]


def knows(monkeypatch: pytest.MonkeyPatch, redriven: dict[int, set[int]]) -> None:
    home = ExpectedOrigin(app="chat", source=TopicIdentity(cluster="c1", topic="chat.in", id="id-1"))
    monkeypatch.setattr(
        dlq, "known_dead_letters", lambda _settings, _name: KnownDeadLetters(home=home, redriven=redriven)
    )


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Read:
    """What the topic holds."""
    held: Read = []

    def read_letters(
        settings: Any, topic: str, *, partitions: Any = None, start: Any = None, end: Any = None
    ) -> Iterator[DeadLetter | UnreadableDeadLetter]:
        assert topic == "chat.dlq"
        for each in held:
            p = each.partition
            inside = (start or {}).get(p, 0) <= each.offset < (end or {}).get(p, 1 << 60)
            if inside and (partitions is None or p in partitions):
                yield each

    monkeypatch.setattr(dlq, "read_dead_letters", read_letters)
    knows(monkeypatch, {})
    monkeypatch.setenv("KEYLANE_BOOTSTRAP", "nowhere:1")
    return held


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["dlq", *arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def facts(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


def test_list_shows_the_causes(topic: Read) -> None:
    topic += [letter(n, key=b"k%d" % (n % 2)) for n in range(3)]
    topic += [letter(9, error="shop.Refused", message="[bold]no[/bold] \x1b[2J"), rubbish()]
    shown = run("list", "chat")
    assert "LETTERS" in shown
    assert "BEHIND" not in shown
    assert "TimeoutError: no answer after 2 ms" in shown
    assert r"Refused: [bold]no[/bold] \x1b[2J" in shown
    assert "4 dead letters of 2 lanes in chat.dlq" in shown
    assert (
        "1 more record could not be read as a dead letter of this app, "
        "the first at chat.dlq/0@0: it has no header 'keylane-app'" in shown
    )


def test_list_as_json(topic: Read) -> None:
    topic += [letter(0), letter(1), parked(2, 7, key=None), letter(3, source_offset=100), rubbish(5)]
    found = facts("list", "chat")
    causes = found.pop("causes")
    assert found == {
        "app": "chat",
        "topic": "chat.dlq",
        "letters": 3,
        "lanes": 1,
        "left_out": 0,
        "redriven": 0,
        "repeats": 1,
        "unreadable": 1,
        "unreadable_examples": [{"position": "0@5", "reason": "it has no header 'keylane-app'"}],
    }
    assert causes[0] == {
        "stage": "answer",
        "error": "builtins.TimeoutError",
        "message": "no answer after # ms",
        "count": 2,
        "behind": 0,
        "lanes": 1,
        "kinds": {"dead": 2},
        "first": NOW,
        "last": NOW + 1,
        "example": "1@1",
        "example_source": "chat.in/1@101",
        "example_message": "no answer after 1 ms",
    }
    assert (causes[1]["stage"], causes[1]["behind"], causes[1]["first"]) == (None, 1, None)


def test_list_can_show_single_letters(topic: Read) -> None:
    topic += [parked(0, 100, behind=False, key=b"\xff"), parked(1, 100, key=b"\xff"), letter(2, redrives=1)]
    shown = run("list", "chat", "--letters")
    assert "behind chat.in/1@100: TimeoutError" in shown
    assert "hex:ff" in shown
    lines = facts("list", "chat", "--letters", "--limit", "2")
    assert lines["left_out"] == 1
    assert "1 dead letter not shown (--limit)" in run("list", "chat", "--letters", "--limit", "2")
    assert lines["list"][0] == {
        "position": "1@2",
        "source": "chat.in/1@102",
        "kind": "dead",
        "key": "k1",
        "stage": "answer",
        "error": "builtins.TimeoutError",
        "message": "no answer after 2 ms",
        "attempts": 2,
        "failed_at": NOW + 2,
        "park": None,
        "behind": False,
        "redrives": 1,
        "redriven": False,
    }


def test_list_takes_the_filters(topic: Read) -> None:
    now = time.time()
    topic += [
        letter(0, failed_at=now - 7200),
        letter(1, failed_at=now - 60),
        letter(2, key=b"\xff", failed_at=now),
    ]
    assert facts("list", "chat", "--since", "1h")["letters"] == 2
    assert facts("list", "chat", "--until", "1h")["letters"] == 1
    assert facts("list", "chat", "--key", "hex:ff")["letters"] == 1
    assert facts("list", "chat", "--kind", "parked")["letters"] == 0
    assert facts("list", "chat", "--stage", "answer", "--error", "TimeoutError")["letters"] == 3
    assert "0 dead letters of 0 lanes in chat.dlq" in run("list", "chat", "--kind", "parked")


def test_list_leaves_out_redriven_letters(topic: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    topic += [letter(0), letter(1)]
    knows(monkeypatch, {1: {0}})
    assert "1 dead letter of 1 lane in chat.dlq; 1 redriven, not shown (--all)" in run("list", "chat")
    assert facts("list", "chat", "--all")["letters"] == 2
    assert "dead, redriven" in run("list", "chat", "--all", "--letters")
    assert facts("show", "chat", "1@0")["redriven"]


def test_show_prints_all_about_a_letter(topic: Read) -> None:
    topic.append(letter(5, redrives=2))
    shown = run("show", "chat", "1@5")
    for says in (
        "position   chat.dlq/1@5",
        "message    chat.in/1@105, of ",
        "key        k1",
        "app        chat 1.4",
        "kind       dead: its lane continued",
        "redriven   2 times before",
        " in stage answer after 2 attempts",
        "error      builtins.TimeoutError: no answer after 5 ms",
        ".000  answer, attempt 1: TimeoutError: no answer",
        "traceback\n  Traceback (most recent call last):\n    File …\n",
        "headers\n  event-id  e1\n  binary    hex:ff00\n  nothing   -\n",
        'value, 17 bytes\n  {"text": "hello"}\n',
    ):
        assert says in shown, shown


def test_show_as_json(topic: Read) -> None:
    topic.append(letter(5))
    found = facts("show", "chat", "1@5")
    assert found["headers"][1:] == [
        {"name": "binary", "value": "hex:ff00"},
        {"name": "nothing", "value": None},
    ]
    assert found["failures"] == [
        {"stage": "answer", "attempt": 1, "at": NOW - 1, "error": "TimeoutError: no answer"}
    ]
    assert (found["position"], found["source"], found["value"], found["value_hex"]) == (
        "1@5",
        "chat.in/1@105",
        '{"text": "hello"}',
        None,
    )
    topic[0] = letter(5, value=b"\xff\x00", key=None)
    found = facts("show", "chat", "1@5")
    assert (found["key"], found["value"], found["value_hex"]) == (None, None, "ff00")


def test_show_finds_a_letter_by_its_message_and_names_the_others(topic: Read) -> None:
    topic += [rubbish(), letter(0), letter(1), letter(2, source_offset=100, redrives=1)]
    assert "also at    chat.dlq/1@0\n" in run("show", "chat", "--source", "1@100")
    found = facts("show", "chat", "--source", "1@100")
    assert (found["position"], found["also_at"]) == ("1@2", ["1@0"])


def test_show_says_where_a_parked_one_stood(topic: Read) -> None:
    topic += [parked(0, 100, behind=False), parked(1, 100, headers=(), headers_unreadable="bad name")]
    assert "parked     its lane was parked at it" in run("show", "chat", "1@0")
    shown = run("show", "chat", "1@1")
    assert "parked     behind chat.in/1@100" in shown
    assert "failed     -" in shown
    assert "headers    could not be read: bad name" in shown


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"app": "shop"}, "expected a dead letter of app 'chat', found one of app 'shop'"),
        (
            {"topic": "other\x1b[2J"},
            "expected a message of topic 'chat.in', found one of 'other\\x1b[2J'",
        ),
        ({"source_partition": 999}, "expected a message of partition 1, found one of 999"),
        (
            {"cluster": "c2"},
            "expected a message of cluster 'c1', found one of 'c2': the source has changed since. ",
        ),
        (
            {"topic_id": "id-2"},
            "expected a message of topic id 'id-1', found one of 'id-2': the source has changed since. ",
        ),
    ],
)
def test_foreign_letters_are_listed_with_the_reason(topic: Read, more: dict[str, Any], says: str) -> None:
    topic += [letter(0, **more), letter(1, topic_id="", cluster="")]
    shown = run("list", "chat")
    assert "1 dead letter of 1 lane in chat.dlq" in shown
    assert (
        "1 more record could not be read as a dead letter of this app, "
        f"the first at chat.dlq/1@0: foreign: {says}" in shown
    )
    assert facts("list", "chat")["unreadable_examples"][0]["reason"].startswith("foreign: expected ")
    assert f"no redrive foreign: {says}" in " ".join(run("show", "chat", "1@0").split())
    assert facts("show", "chat", "1@0")["foreign"].startswith("foreign: expected ")
    assert facts("show", "chat", "1@1")["foreign"] is None


def test_show_prints_a_record_that_is_not_a_letter(topic: Read) -> None:
    topic.append(rubbish(3))
    shown = run("show", "chat", "0@3")
    assert "unreadable it has no header 'keylane-app'" in shown
    assert "value, 4 bytes\n  junk\n" in shown
    found = facts("show", "chat", "0@3")
    assert (found["readable"], found["reason"]) == (False, "it has no header 'keylane-app'")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "value      none: a tombstone"),
        (b"", "value, 0 bytes"),
        (b"\x00\xffAB", "000000  00 ff 41 42                                      ..AB"),
        (b"x" * 5000, "… 1,000 more characters; use --raw for all"),
        (b"\xff" * 600, "… 88 more bytes; use --raw for all"),
        (b"one\n\ttwo \xe2\x80\x8d", "  one\n          two \\u200d\n"),
    ],
)
def test_dlq_show_gives_a_bounded_value_as_text_or_bytes(topic: Read, value: bytes | None, says: str) -> None:
    topic.append(letter(0, value=value))
    shown = run("show", "chat", "1@0")
    assert says in shown
    assert len(shown) < 8000


def test_time_outside_the_calendar_is_shown(topic: Read) -> None:
    topic.append(
        letter(0, timestamp=10**17, failures=(FailedAttempt(stage="s", attempt=1, at=-1e300, error="e"),))
    )
    assert "of 1e+14 s" in run("show", "chat", "1@0")


def test_raw_writes_the_bytes_and_nothing_else(topic: Read) -> None:
    topic.append(letter(0, value=bytes(range(256)) + b"\r\n"))
    done = CliRunner().invoke(app, ["dlq", "show", "chat", "1@0", "--raw"])
    assert done.stdout_bytes == bytes(range(256)) + b"\r\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["list", "chat", "--key", "nobody"], "no dead letter of app 'chat' has the key nobody"),
        (
            ["list", "chat", "--key", "hex:x"],
            "expected hex digits after 'hex:', two per byte, such as hex:00ff, got 'hex:x'",
        ),
        (["list", "chat", "--since", "noon"], "--since: expected an age"),
        (["list", "chat", "--since", "1h", "--until", "2h"], "--since must be before --until, got 1h and 2h"),
        (["list", "chat", "-o", "security.protocol=SSL"], "--option: expected kafka.NAME=VALUE"),
        (["list", "chat", "-o", "kafka.acks=0"], "option 'kafka.acks' cannot be set"),
        (["show", "chat"], "expected one dead letter"),
        (["show", "chat", "1@2", "--source", "1@2"], "expected one dead letter"),
        (["show", "chat", "17"], "such as 3@17 or chat.dlq/3@17, got '17'"),
        (["show", "chat", "--source", "x"], "such as 3@17 or chat.dlq/3@17, got 'x'"),
        (["show", "chat", "1@99"], "no dead letter at chat.dlq/1@99"),
        (["show", "chat", "--source", "1@99"], "app 'chat' has no dead letter for 1@99 of its source"),
        (["show", "chat", "1@0", "--raw"], "letter chat.dlq/1@0 has no value: it is a tombstone"),
        (["show", "chat", "1@0", "--raw", "--json"], "give --raw or --json, not both"),
        (["list", "chat", "--bootstrap", ""], "no broker address: pass --bootstrap host:9092"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    topic: Read,
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    topic.append(letter(0, value=None))
    monkeypatch.setattr("sys.argv", ["keylane", "dlq", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert says in err


def test_an_error_of_the_topic_is_handed_on(topic: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise KeylaneError("app 'chat' has no dead letters")

    monkeypatch.setattr(dlq, "read_dead_letters", read)
    done = CliRunner().invoke(app, ["dlq", "list", "chat"])
    assert isinstance(done.exception, KeylaneError)


@pytest.mark.parametrize(("command", "examples"), [("list", 3), ("show", 3), ("redrive", 4)])
def test_help_teaches_by_example(command: str, examples: int) -> None:
    shown = run(command, "--help")
    assert shown.count(f"\n  keylane dlq {command} chat") == examples
