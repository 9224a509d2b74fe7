"""Results and published values as JSON, and what is said about those that cannot be."""

from __future__ import annotations

import threading
from collections import UserDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePosixPath
from typing import Any, Protocol
from uuid import UUID

import msgspec
import pytest
from pydantic import BaseModel

from keylane import App, Message, SettingsError
from keylane.event import encode_value
from keylane.handlers.encoding import as_bytes, refuse_type
from keylane.testing import Harness

AT = datetime(2026, 11, 18, 12, 30, tzinfo=UTC)


class Colour(Enum):
    RED = "red"


class Model(BaseModel):
    id: UUID
    at: datetime
    price: Decimal


class Struct(msgspec.Struct):
    id: UUID
    price: Decimal


@dataclass
class Line:
    model: Model
    tags: list[str]


class Anything(BaseModel, arbitrary_types_allowed=True):
    lock: Any


MODEL = Model(id=UUID(int=1), at=AT, price=Decimal("1.10"))
JSON = b'{"id":"00000000-0000-0000-0000-000000000001","at":"2026-11-18T12:30:00Z","price":"1.10"}'


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (MODEL, JSON),
        ([MODEL], b"[" + JSON + b"]"),
        ({"m": MODEL}, b'{"m":' + JSON + b"}"),
        (Line(MODEL, ["a"]), b'{"model":' + JSON + b',"tags":["a"]}'),
        (
            Struct(UUID(int=1), Decimal(2)),
            b'{"id":"00000000-0000-0000-0000-000000000001","price":"2"}',
        ),
        (AT, b'"2026-11-18T12:30:00Z"'),
        (date(2026, 11, 18), b'"2026-11-18"'),
        (timedelta(seconds=90), b'"PT1M30S"'),
        (Decimal("1.10"), b'"1.10"'),
        (UUID(int=1), b'"00000000-0000-0000-0000-000000000001"'),
        (Colour.RED, b'"red"'),
        ({"p": PurePosixPath("/a")}, b'{"p":"/a"}'),
        ((1, 2), b"[1,2]"),
    ],
)
def test_usual_types_are_json(value: Any, encoded: bytes) -> None:
    assert as_bytes(value) == encoded
    assert encode_value(value) == encoded


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"order": {"lines": [1, threading.Lock()]}}, r"field 'order.lines\[1\]': _thread.lock is not JSON"),
        (Anything(lock=threading.Lock()), "field 'lock': _thread.lock is not JSON"),
        ({"a": [0.5, float("nan")]}, r"field 'a\[1\]': nan is not JSON"),
        ({"a": {(1, 2): 3}}, "field 'a': its keys are not text"),
        (object(), "^object is not JSON"),
        (UserDict({"a": 1}), "^collections.UserDict is not JSON"),
        ({"a": {1, 2}}, "field 'a': set is not JSON"),
        ({"a": Model}, "field 'a': .*Model is a class, not a value"),
    ],
)
def test_unserialisable_value_names_type_and_field(value: Any, complaint: str) -> None:
    with pytest.raises((TypeError, ValueError), match=complaint):
        as_bytes(value)


def test_value_inside_itself_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ValueError, match=r"list is not JSON|Circular"):
        as_bytes(circle)


def test_stage_may_return_a_model() -> None:
    app = App("shop", source="in", sink="out")

    @app.stage
    async def price(msg: Message) -> Model:
        return MODEL

    run = Harness(app)
    run.send(key=b"a", value=b"1")
    result = run.run()
    assert [one.value for one in result.results] == [JSON]
    assert not result.dead


def test_stage_that_can_never_be_written_is_refused_early() -> None:
    app = App("shop", source="in", sink="out")

    @app.stage
    async def connect(msg: Message) -> Connection:
        return Connection()

    with pytest.raises(
        SettingsError, match=r"stage 'connect': its result cannot be written: .*Connection is"
    ):
        app.check()


class Row(dict[str, Any]):
    pass


class Base:
    pass


@dataclass
class Derived(Base):
    id: int


class Shape(Protocol):
    id: int


class Connection:
    pass


@pytest.mark.parametrize("annotation", [Row, defaultdict, Base, Shape, Sequence])
def test_annotation_that_allows_json_is_not_refused(annotation: Any) -> None:
    assert refuse_type(annotation) is None


@pytest.mark.parametrize(
    "annotation",
    [None, Any, dict, bytes, Model, Struct, Line, Colour, datetime, Decimal, UUID, dict[str, Model]],
)
def test_types_that_can_be_written_are_not_refused(annotation: Any) -> None:
    assert refuse_type(annotation) is None
