"""What is decided about a topic's table before anything is read: spans, filters, columns, limits."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from keylane import BrokerError, SettingsError
from keylane.kafka.offset_range import OffsetRange, split_ranges
from keylane.spark.pushdown import Narrowing
from keylane.spark.rows import Rows
from keylane.spark.topic import _json, _limited, _places

SPANS = [OffsetRange("a", 0, 0, 100), OffsetRange("a", 1, 50, 60), OffsetRange("b", 0, 0, 1000)]


def narrowed(*filters: Filter) -> Narrowing:
    found = Narrowing()
    for each in filters:
        found.add(each)
    return found


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 300)), min_size=1, max_size=5), st.integers(1, 40)
)
def test_a_divided_span_has_the_same_offsets(sizes: list[tuple[int, int]], parts: int) -> None:
    spans = [OffsetRange("t", p, start, start + size) for p, (start, size) in enumerate(sizes) if size]
    divided = split_ranges(spans, parts)
    assert len(divided) <= parts + len(spans)
    assert [(s.partition, o) for s in divided for o in range(s.start, s.end)] == [
        (s.partition, o) for s in spans for o in range(s.start, s.end)
    ]
    assert all(len(span) for span in divided)


def test_a_large_partition_is_cut_and_a_small_one_is_not() -> None:
    divided = split_ranges([OffsetRange("t", 0, 0, 900), OffsetRange("t", 1, 0, 100)], 10)
    assert [len(span) for span in divided if span.partition == 0] == [100] * 9
    assert [span for span in divided if span.partition == 1] == [OffsetRange("t", 1, 0, 100)]


def test_filters_choose_topics_partitions_and_offsets() -> None:
    assert narrowed().apply(SPANS) == SPANS
    assert narrowed(EqualTo(("topic",), "a")).apply(SPANS) == SPANS[:2]
    assert narrowed(In(("topic",), ("b", "c")), EqualNullSafe(("topic",), "b")).apply(SPANS) == SPANS[2:]
    assert narrowed(EqualTo(("partition",), 1)).apply(SPANS) == SPANS[1:2]
    assert narrowed(In(("partition",), (1, 2))).apply(SPANS) == SPANS[1:2]
    assert narrowed(GreaterThan(("partition",), 5)).apply(SPANS) == []
    offsets = narrowed(GreaterThanOrEqual(("offset",), 55), LessThan(("offset",), 58))
    assert offsets.apply(SPANS[1:2]) == [OffsetRange("a", 1, 55, 59)], "wider by one, never narrower"
    assert narrowed(LessThanOrEqual(("offset",), 10), EqualTo(("partition",), 0)).apply(SPANS[:1]) == [
        OffsetRange("a", 0, 0, 11)
    ]
    assert narrowed(EqualTo(("offset",), 7)).apply(SPANS[:1]) == [OffsetRange("a", 0, 7, 8)]


def test_a_time_has_a_beginning_and_no_end() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    milliseconds = int(at.timestamp() * 1000)
    assert narrowed(GreaterThan(("timestamp",), at)).since in (milliseconds - 1, milliseconds)
    assert narrowed(LessThan(("timestamp",), at)).since is None
    assert narrowed(GreaterThan(("timestamp",), datetime(1950, 1, 1, tzinfo=UTC))).since == 0


@pytest.mark.parametrize(
    "given",
    [
        Not(EqualTo(("partition",), 0)),
        IsNotNull(("key",)),
        StringStartsWith(("topic",), "b"),
        EqualTo(("key",), b"x"),
        EqualTo(("offset",), "7"),
        EqualTo(("offset",), None),
        In(("partition",), ()),
        EqualTo(("a", "offset"), 7),
        GreaterThan(("topic",), "a"),
        LessThan(("timestamp",), 7),
    ],
)
def test_unrelated_filters_exclude_nothing(given: Filter) -> None:
    found = narrowed(given)
    assert found.apply(SPANS) == SPANS
    assert found.since is None


def schema(**columns: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def test_topic_plan_refuses_unknown_or_mistyped_columns() -> None:
    Rows(schema(offset=LongType(), value=BinaryType()))
    with pytest.raises(SettingsError, match=r"unknown column 'vlaue'; expected one of key, value"):
        Rows(schema(vlaue=BinaryType()))
    with pytest.raises(
        SettingsError, match="column 'value' must be a binary, got string: cast it afterwards"
    ):
        Rows(schema(value=StringType()))
    with pytest.raises(SettingsError, match="column 'offset' must be a bigint"):
        Rows(schema(offset=IntegerType()))


def test_limit_is_distributed_by_available_offsets() -> None:
    begun = {("t", 0): 0, ("t", 1): 100}
    ends = {("t", 0): 900, ("t", 1): 200, ("t", 2): 1}
    assert _limited(begun, ends, 2000) == ends
    limited = _limited(begun, ends, 100)
    assert limited == {("t", 0): 89, ("t", 1): 109, ("t", 2): 1}, "everybody moves"
    assert _limited(begun, {("t", 0): 0, ("t", 1): 100}, 1) == begun


def test_offsets_of_a_stream_look_like_sparks() -> None:
    places = {("b", 10): 1, ("b", 2): 3, ("a", 0): 7}
    assert list(_json(places).items()) == [("a", {"0": 7}), ("b", {"2": 3, "10": 1})]
    assert _places(_json(places)) == places


class _Nameless:
    """A message whose header's name the client cannot represent."""

    def headers(self) -> Any:
        return b"\xff".decode()

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return 3

    def offset(self) -> int:
        return 7


def test_topic_plan_names_the_position_of_a_bad_header() -> None:
    headers = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
    assert Rows(schema(offset=LongType())).to_arrow("t", 3, [_Nameless()]).num_rows == 1
    with pytest.raises(BrokerError, match=r"t/3@7: a header name is not UTF-8.*without includeHeaders"):
        Rows(schema(headers=headers)).to_arrow("t", 3, [_Nameless()])
