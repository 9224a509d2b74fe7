"""Every decoder of records: any bytes give a value or the one declared error, in a bounded time and little memory."""

from __future__ import annotations

import base64
import json
import time
import tracemalloc
import zlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane import strict_json as wire
from keylane.engine.version_store import VersionStore
from keylane.errors import SettingsError
from keylane.kafka.settings import KafkaSettings
from keylane.lanes.lane_record import (
    LaneRecord,
    LaneStatus,
    RetryState,
    decode_lane,
    decode_retries,
    encode_retries,
)
from keylane.offsets.assignment import BUCKETS
from keylane.offsets.offset_runs import OffsetRuns
from keylane.offsets.offset_set import OffsetBlock, OffsetSet
from keylane.offsets.range_progress import Generation, RangeProgress, RangeSegment
from keylane.offsets.slots import ALL, Slots
from keylane.offsets.watermark import PartitionProgress
from keylane.policies.failure_info import FailureInfo
from keylane.policies.versions import MAX_VERSION, VersionMark, decode_mark
from keylane.readmodel.snapshots import decode_pointer
from keylane.spark.options import Options
from keylane.spark.topic_options import TopicOptions
from keylane.state import records
from keylane.state.commands import Command, audit_name, decode_command
from keylane.state.topic import ELSEWHERE, Claim, Proposal, StateTopic, kind_of
from keylane.strict_json import MalformedRecordError
from keylane.telemetry import snapshot as telemetry
from support.snapshots import histogram, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

LETTER = FailureInfo(
    stage="s", error="E", message="m \u00e4", traceback="t", attempts=3, failed_at=1.5, failures=()
)
LANE = LaneRecord(
    stop=LaneStatus.PARKED, key=b"k", partition=0, offset=17, since=12.5, letter=LETTER, why="because"
)
ORDER = Command(do="redrive", partition=0, key=b"k", letters=(1, 2), id="a1", who="ann@host", at=5.0)
RESET = Command(do="reset", partition=0, key=b"k", to=41, id="a3", who="ann@host", at=5.0)
SKIP = Command(do="skip", partition=0, key=None, offset=7, id="a2", who="ann@host", at=5.0)
PENDING = OffsetSet([OffsetBlock.of(0, [7, 9, 11])])
PROGRESS = PartitionProgress(watermark=7, position=20, pending=PENDING)
STANDING = RangeProgress(Slots(0, 99), 2, (RangeSegment(Slots(0, 99), PROGRESS),), Generation(4, 12))
KEPT = {4: RetryState(stage="s", attempt=2, attempts=2, since=1.0, due=2.0)}
PLAN = {"run": "r", "epoch": 2, "at": 3.5, "tasks": [["0:0-9", "1"], ["0:10-65535"]], "source": "in"}


def dumped(value: object) -> bytes:
    return json.dumps(value).encode()


RECORDS: dict[bytes, bytes] = {
    b"version/k": VersionMark(7, 6, 12, 4, b"5:4,6:11,7!12", b"2-3").encode(),
    b"versions": b"12",
    b"versions/0-99": b"12",
    b"progress": b"7 kl1:abc",
    b"epoch": Proposal(3, 7, "kl1:abc", OffsetRuns([1, 2, 9]).encode().decode()).encode(),
    b"range/0-99": STANDING.encode(900_000),
    b"grouped": dumped([3, None]),
    b"attempts": encode_retries(KEPT, 1000),
    b"attempts/0-99": encode_retries(KEPT, 1000),
    b"lane/k": LANE.encode(),
    b"keyless/17": LANE.encode(),
    b"redriven": OffsetRuns([1, 2, 9]).encode(),
    b"run": dumped({"run": "other", "who": "host:1", "at": 9.5}),
    b"load/0-99": dumped(["r", 3, [1] * BUCKETS]),
    b"plan": dumped(PLAN),
    b"former": dumped([1, 2]),
    b"command/plan": dumped({"run": "r", "number": 2, "tasks": 5}),
    b"owner/chat.a1": dumped({"run": "r", "who": "w", "slots": "0-99", "leaving": True}),
    b"command/stop": dumped({"run": "r"}),
    b"command/guard": dumped({"run": "r", "why": "most failed"}),
    ORDER.name: ORDER.encode(),
    RESET.name: RESET.encode(),
    audit_name("a1"): dumped({"do": "skip", "id": "a1"}),
    b"rest": dumped({"run": "r", "until": 40}),
}
"""One good record of every kind."""

ADVERSARIAL = [
    b"", b"null", b"{}", b"[]", b"[[]]", b"0", b'""', b"1e999", b"-1e999", b"NaN", b"[Infinity]", b"\xff\xfe",
    b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 50_000, b"9" * 100_000, b"1e" + b"9" * 100_000,
    b'{"run": 1e999}', b'{"run": {}, "who": [], "at": 1e999}', b'{"run": "r", "who": "w", "at": 1e300}',
    b'{"stop":"blocked","offset":1e999,"since":0,"why":"","letter":{}}', b'["\\ud800"]', b'{"run": "\\ud800"}',
    b"[1,2]", b"[[1,2,3,4,5,6]]", b'["r", 1, [1e308, 1e308]]', b'[0, null, []]', b'[0, 0, [["0-1", false, 1e999, ""]]]',
    b"99999999999999999999 1 1", b"-5 -5 -5", b"1 2", b"1 " * 400_000, b'{"run": "r", "number": 1, "tasks": 1e9}',
    b'{"run": "r", "number": 1, "tasks": 1000000000}', b'{"run": "r", "why": []}', b'{"run": "r", "until": -1}',
    b'{"run":"r","epoch":1,"at":1,"tasks":"abc"}', b'{"run":"r","epoch":1,"at":1,"tasks":[["x"]]}', b"[1,2,3,4]",
    base64.b64encode(zlib.compress(b"[" + b"0" * 60_000_000, 9)),
    base64.b64encode(zlib.compress(b"[" + b"1," * 20_000_000 + b"1]", 9)),
    base64.b64encode(zlib.compress(b"[" * 1_000_000, 9)),
]  # fmt: skip


class Everything:
    """Labels that fit every record."""

    def accepts(self, name: bytes, message: Any) -> bool:
        return True

    def letters_match(self, message: Any) -> bool:
        return True


def record(name: bytes, value: bytes | None, offset: int = 5) -> Any:
    return SimpleNamespace(
        key=lambda: name, value=lambda: value, partition=lambda: 0, offset=lambda: offset, headers=list
    )


def state() -> StateTopic:
    made: Any = (KafkaSettings("b:1"), "chat", "chat.state", [0], "r", object(), VersionStore())
    return StateTopic(*made, labels=Everything())  # type: ignore[arg-type]


def look_at(seen: StateTopic) -> None:
    """What its users ask for after every record."""
    assert seen.successor is None or seen.successor["run"] != "r"
    assert all(standing.watermark >= 0 for standing in seen.range_progresses.get(0, {}).values())
    seen.progress(0, 0, ELSEWHERE)
    for found in seen.loads.get(0, {}).values():
        assert len(found[1]) == BUCKETS
    for taken in seen.take_commands():
        assert taken.name
    assert seen.stopped in (True, False)


DECODERS: list[tuple[Callable[[bytes], object], bytes]] = [
    (lambda value: decode_lane(b"lane/k", 0, value), RECORDS[b"lane/k"]),
    (decode_retries, RECORDS[b"attempts"]),
    (lambda value: RangeProgress.decode("0-99", value), RECORDS[b"range/0-99"]),
    (OffsetRuns.decode, RECORDS[b"redriven"]),
    (decode_mark, RECORDS[b"version/k"]),
    (lambda value: decode_command(ORDER.name, 0, value), ORDER.encode()),
    (lambda value: decode_command(SKIP.name, 0, value), SKIP.encode()),
    (lambda value: decode_command(RESET.name, 0, value), RESET.encode()),
    (Proposal.decode, RECORDS[b"epoch"]),
    (records.decode_run, RECORDS[b"run"]),
    (records.decode_claim, RECORDS[b"owner/chat.a1"]),
    (records.decode_progress, RECORDS[b"progress"]),
    (records.decode_load, RECORDS[b"load/0-99"]),
    (records.decode_plan, RECORDS[b"plan"]),
    (records.decode_replan, RECORDS[b"command/plan"]),
    (records.decode_grouped, RECORDS[b"grouped"]),
    (records.decode_stop, RECORDS[b"command/stop"]),
    (records.decode_guard_stop, RECORDS[b"command/guard"]),
    (records.decode_rest, RECORDS[b"rest"]),
    (wire.loads, RECORDS[b"plan"]),
    (telemetry.decode, snapshot(breakers={"pay": "open"}, latency=histogram(0.1)).encode()),
]

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(
            st.sampled_from(
                [
                    "run",
                    "who",
                    "at",
                    "stop",
                    "offset",
                    "since",
                    "why",
                    "letter",
                    "tasks",
                    "epoch",
                    "do",
                    "until",
                ]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=15,
)


@st.composite
def mutated(draw: st.DrawFn, value: bytes) -> bytes:
    """A good record with a few bytes changed, taken out or doubled, or one of its values replaced."""
    if draw(st.booleans()) and value[:1] in (b"{", b"["):
        found = json.loads(value)
        name = draw(st.sampled_from(sorted(found) if isinstance(found, dict) else range(len(found))))
        found[name] = draw(JSON)
        return json.dumps(found).encode()
    raw = bytearray(value)
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(raw)))
        end = begin + draw(st.integers(0, 4))
        raw[begin:end] = draw(st.binary(max_size=6))
    return bytes(raw)


def total(decode: Callable[[bytes], object], value: bytes) -> None:
    """It returns, or raises the one error."""
    try:
        decode(value)
    except MalformedRecordError as error:
        assert len(str(error).encode()) < 2000  # noqa: PT017 - it may not raise, too


@pytest.mark.parametrize("place", range(len(DECODERS)))
@settings(max_examples=60, deadline=2000)
@given(data=st.data())
def test_decoders_raise_one_error_for_any_bytes(place: int, data: st.DataObject) -> None:
    decode, good = DECODERS[place]
    decode(good)
    total(decode, data.draw(st.binary(max_size=60) | JSON.map(dumped) | mutated(good)))


@pytest.mark.parametrize("place", range(len(DECODERS)))
def test_decoders_take_little_time_and_memory(place: int) -> None:
    decode, _ = DECODERS[place]
    for value in ADVERSARIAL:
        tracemalloc.start()
        began = time.process_time()
        total(decode, value)
        assert time.process_time() - began < 2
        assert tracemalloc.get_traced_memory()[1] < 200_000_000
        tracemalloc.stop()


@settings(max_examples=150, deadline=2000)
@given(data=st.data(), name=st.sampled_from(sorted(RECORDS)))
def test_no_state_record_raises(data: st.DataObject, name: bytes) -> None:
    seen = state()
    for _ in range(3):
        value = data.draw(st.none() | mutated(RECORDS[name]) | JSON.map(dumped) | st.binary(max_size=20))
        seen._take(record(name + data.draw(st.sampled_from([b"", b"\xff", b"/", b"/x"])), value))
        look_at(seen)


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_no_adversarial_state_record_raises(name: bytes) -> None:
    seen = state()
    for value in ADVERSARIAL:
        seen._take(record(name, value))
        look_at(seen)


@pytest.mark.parametrize("name", sorted(set(RECORDS) - {audit_name("a1")}))
def test_a_malformed_record_hides_no_good_one(name: bytes) -> None:
    def known(seen: StateTopic) -> object:
        kept = vars(seen) | {"versions": seen.versions and seen.versions._young}
        beside = ("malformed", "_labels", "_consumer", "_reader", "_follower", "_next")
        return {key: kept[key] for key in kept if key not in beside}

    seen, other = state(), state()
    for one in (seen, other):
        one._take(record(name, RECORDS[name]))
    seen._take(record(name, b'{"junk": 1e999}', offset=6))
    assert seen.malformed == {kind_of(name): 1}
    seen_now, other_now = known(seen), known(other)
    if name.startswith(b"owner/"):
        assert seen.owners[0].keys() == other.owners[0].keys()
        (claim,) = seen.owners[0].values()
        assert (claim.place, claim.slots) == (5, Slots(0, 99))
    else:
        assert seen_now == other_now


def test_a_malformed_claim_is_fenced_and_takes_nothing_over() -> None:
    seen = state()
    seen._take(record(b"owner/chat.a1", b"{}"))
    (claim,) = seen.owners[0].values()
    assert isinstance(claim, Claim)
    assert claim.place < 0
    assert claim.slots == ALL
    seen._take(record(b"owner/chat.a1", None))
    assert not seen.owners[0]


def test_a_claim_names_only_ids_of_the_app() -> None:
    seen = state()
    seen._take(record(b"owner/bank.a1", RECORDS[b"owner/chat.a1"]))
    assert not seen.owners.get(0)
    assert seen.malformed == {"owner": 1}


def test_malformed_records_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    seen = state()
    for number in range(50):
        seen._take(record(b"lane/%d" % number, b"x" * 100_000))
        seen._take(record(b"unknown/%d" % number, b"{}"))
    assert seen.malformed == {"lane": 50}
    (line,) = [one.getMessage() for one in caplog.records]
    assert line.startswith("ignoring malformed state records kind=lane first=chat.state/0@5: ")
    assert len(line) < 500


def test_marks_beyond_the_stored_range_are_malformed() -> None:
    assert decode_mark(b"%d -1 0 0 - - -" % MAX_VERSION) == VersionMark(MAX_VERSION, -1, 0, 0)
    for value in (b"%d -1 0 0 - - -", b"7 -1 0 0 %d:0 - -", b"7 -1 0 0 - 1-%d -", b"7 -1 0 0 - - %d!3"):
        with pytest.raises(MalformedRecordError):
            decode_mark(value % (MAX_VERSION + 1))


DEEP = ["[" * 100_000, '{"a":' * 100_000, "1e999", "9" * 10_000, "[" * 100_000 + "]" * 100_000]


@pytest.mark.parametrize("value", DEEP)
def test_options_with_invalid_json_are_settings_errors(value: str) -> None:
    with pytest.raises(SettingsError, match="startingOffsets") as refused:
        Options.parse({"bootstrap": "b:1", "startingOffsets": value}, "t")
    assert len(str(refused.value)) < 500
    for option in ("startingOffsets", "assign"):
        given = {"kafka.bootstrap.servers": "b:1", **({} if option == "assign" else {"subscribe": "t"})}
        with pytest.raises(SettingsError, match=option) as refused:
            TopicOptions.parse({**given, option: value}, stream=False)
        assert len(str(refused.value)) < 500


FOLDER = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    "folder", ["../../etc", "/etc", "", ".", "a/b", FOLDER + "/..", None, 7, FOLDER[:-1]]
)
def test_a_pointer_names_a_folder_of_its_table(folder: Any) -> None:
    good = {"folder": FOLDER, "form": "f", "offsets": {"in": {"0": 7}}}
    assert decode_pointer(3, dumped(good)).folder == FOLDER
    with pytest.raises(MalformedRecordError):
        decode_pointer(3, dumped(good | {"folder": folder}))


@settings(max_examples=100, deadline=2000)
@given(st.binary(max_size=60) | JSON.map(dumped))
def test_a_pointer_is_read_or_malformed(value: bytes) -> None:
    total(lambda found: decode_pointer(1, found), value)
