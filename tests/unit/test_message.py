from __future__ import annotations

from typing import assert_type

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane import App, Message
from keylane.message import with_origin
from keylane.testing import Harness, MemoryRecord

Headers = list[tuple[str, bytes | None]]
KEY, EVENT = st.binary(max_size=4), st.text(min_size=1, max_size=4)


class CountingRecord(MemoryRecord):
    """Counts how often its headers are asked for."""

    asked = 0

    def headers(self) -> Headers | None:
        self.asked += 1
        found = super().headers()
        return None if found is None else list(found)


def record(
    *headers: tuple[str, bytes | None],
    key: bytes | None = b"k",
    offset: int = 7,
    timestamp: int | None = None,
) -> CountingRecord:
    return CountingRecord(
        topic="chat.in",
        partition=2,
        offset=offset,
        key=key,
        value=b"v",
        headers=headers,
        timestamp=timestamp,
    )


def message(*headers: tuple[str, bytes | None], key: bytes | None = b"k", offset: int = 7) -> Message:
    return Message(record(*headers, key=key, offset=offset))


def test_message_has_the_values_of_its_record() -> None:
    msg = Message(record(("h", b"1"), timestamp=1234))
    assert (msg.topic, msg.partition, msg.offset, msg.key, msg.value) == ("chat.in", 2, 7, b"k", b"v")
    assert (msg.headers, msg.timestamp, msg.attempt) == ([("h", b"1")], 1234, 1)
    assert msg.position == "chat.in/2@7"
    assert repr(msg) == "<Message chat.in/2@7 key=b'k' attempt=1>"


def test_headers_are_read_lazily_and_once() -> None:
    source = record(("event-id", b"e"))
    msg = Message(source)
    assert source.asked == 0
    assert (msg.event_id, msg.type, msg.version, msg.headers) == ("e", None, None, [("event-id", b"e")])
    assert source.asked == 1


def test_no_headers_are_an_empty_list() -> None:
    assert message().headers == []
    assert message().header("any") is None


def test_a_record_without_a_timestamp_has_none() -> None:
    assert message().timestamp is None
    assert Message(record(timestamp=0)).timestamp == 0


def test_default_event_id_is_the_position() -> None:
    assert message().event_id == "chat.in/2/7"
    assert message(("event-id", None)).event_id == "chat.in/2/7"
    assert message(("event-id", b"")).event_id == "chat.in/2/7"


def test_last_header_with_a_value_counts() -> None:
    msg = message(("event-type", b"old"), ("x", b""), ("event-type", b"new"))
    assert msg.type == "new"
    assert [name for name, _ in msg.headers] == ["event-type", "x", "event-type"]
    assert message(("event-type", b"old"), ("event-type", None)).type == "old"


def test_an_empty_header_is_there() -> None:
    assert message(("event-type", b"")).type == ""


def test_header_names_are_case_sensitive() -> None:
    assert message(("Event-Type", b"x")).type is None


def test_event_ids_that_are_not_utf8_stay_different() -> None:
    """Sixteen raw bytes of a UUID are an event id too."""
    one, other = message(("event-id", b"\xff\x01")), message(("event-id", b"\xfe\x01"))
    assert one.event_id == "\\xff\x01"
    assert one.event_id != other.event_id
    assert one.request_id != other.request_id


@given(st.binary(max_size=20))
def test_any_bytes_make_an_event_id_that_can_be_encoded(value: bytes) -> None:
    msg = message(("event-id", value))
    assert msg.event_id.encode()
    assert len(msg.request_id) == 32


@pytest.mark.parametrize(("text", "version"), [(b"1", 1), (b"0", 0), (b" 12 ", 12), (b"-3", -3)])
def test_a_version_is_a_number(text: bytes, version: int) -> None:
    assert message(("event-version", text)).version == version


@pytest.mark.parametrize("text", [b"", b"one", b"1.5", b"\xff", b"9" * 5000])
def test_version_that_is_not_a_number_raises(text: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        _ = message(("event-version", text)).version


def test_request_id_depends_only_on_key_and_event_id() -> None:
    header = ("event-id", b"e-1")
    first = message(header)
    again = message(header, offset=99)
    again.attempt = 4
    again.value = {"changed": True}
    assert first.request_id == again.request_id == "c6db4623be3ee59febe98ed76069b4ff"


def test_the_request_id_differs_by_event_and_by_key() -> None:
    found = {
        message(("event-id", event), key=key).request_id
        for event in (b"1", b"2", b"3")
        for key in (b"a", b"b", b"", None, b"\x00")
    }
    found |= {message(offset=1).request_id, message(offset=2).request_id}
    assert len(found) == 17


@given(KEY, EVENT, KEY, EVENT)
def test_key_and_event_id_cannot_be_mistaken_for_each_other(
    key: bytes, event: str, other_key: bytes, other_event: str
) -> None:
    one = message(("event-id", event.encode()), key=key).request_id
    other = message(("event-id", other_event.encode()), key=other_key).request_id
    assert (one == other) == ((key, event) == (other_key, other_event))


def test_unreadable_header_name_raises_on_access() -> None:
    class Broken(CountingRecord):
        def headers(self) -> Headers | None:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    msg = Message(Broken(topic="t", partition=0, offset=0, key=None, value=None))
    assert msg.position == "t/0@0"
    with pytest.raises(UnicodeDecodeError):
        _ = msg.headers


# What travels along a chain of apps.


def test_origin_time_defaults_to_the_timestamp() -> None:
    assert Message(record(timestamp=5)).origin_time == 5
    assert Message(record(("origin-time", b"3"), timestamp=5)).origin_time == 3
    assert Message(record(("origin-time", b"soon"), timestamp=5)).origin_time == 5
    assert Message(record(("origin-time", None))).origin_time is None


def test_a_result_gets_the_origin_time_once() -> None:
    first = Message(record(("a", b"b"), timestamp=5))
    headers = with_origin(first, first.headers)
    assert headers == [("a", b"b"), ("origin-time", b"5")]
    assert first.headers == [("a", b"b")]
    second = Message(record(*headers, timestamp=9))
    assert with_origin(second, second.headers) == headers
    nothing = Message(record())
    assert with_origin(nothing, nothing.headers) == []


def test_trace_has_the_headers_to_pass_on() -> None:
    parent = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert Message(record(("traceparent", parent))).trace == {"traceparent": parent.decode()}
    both = Message(record(("traceparent", parent), ("tracestate", b"a=1"), ("tracestate", b"b=2")))
    assert both.trace == {"traceparent": parent.decode(), "tracestate": "a=1,b=2"}
    assert Message(record(("tracestate", b"a=1"))).trace == {}
    assert Message(record(("traceparent", parent), ("traceparent", parent))).trace == {}, (
        "W3C: as good as none"
    )


def test_value_has_the_type_that_the_message_names() -> None:
    app = App("typed", source="in", sink="out", decode="json")

    @app.stage
    async def price(msg: Message[dict[str, int]]) -> int:
        assert_type(msg.value, dict[str, int])  # for mypy
        return msg.value["amount"]

    @app.stage
    async def twice(msg: Message[int]) -> int:
        return 2 * msg.value

    run = Harness(app)
    run.send({"amount": 21}, key="k")
    assert [result.value for result in run.run().results] == [b"42"]
