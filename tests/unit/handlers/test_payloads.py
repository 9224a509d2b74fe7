"""Typed payloads: decoded and validated before the handler, poison with the field named otherwise."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic
import pytest

from keylane import App, Message, SettingsError
from keylane.spark.packaging import pack
from keylane.testing import Harness, RunResult

if TYPE_CHECKING:
    from collections import OrderedDict

pytestmark = pytest.mark.usefixtures("quiet")


@dataclass
class Item:
    sku: str
    count: int = 1


@dataclass
class Plain:
    order: str
    amount: Decimal
    at: datetime
    items: list[Item]


class Struct(msgspec.Struct):
    order: str
    amount: int
    items: list[Item] = []


class Model(pydantic.BaseModel):
    order: str
    amount: int
    items: list[Item] = []


GOOD = (
    b'{"order": "o1", "amount": "12.50", "at": "2026-01-02T03:04:05Z", "items": [{"sku": "s", "count": 2}]}'
)


def run(app: App, *values: bytes | None) -> RunResult:
    harness = Harness(app)
    for number, value in enumerate(values):
        harness.send(key=b"k", value=value, headers=[("event-type", b"T")], at=number * 0.01)
    result = harness.run()
    result.verdict.raise_if_bad() if len(values) > 1 else None
    return result


def make(**options: Any) -> App:
    return App("typed", source="in", **{"sink": "out", **options})


def test_payload_dataclass_is_decoded_beside_the_message() -> None:
    app = make()
    got: list[Plain] = []

    @app.on("T")
    async def paid(event: Plain, msg: Message) -> str:
        got.append(event)
        return f"{msg.key!r} {event.order}"

    result = run(app, GOOD)
    assert got == [Plain("o1", Decimal("12.50"), datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), [Item("s", 2)])]
    assert [written.value for written in result.results] == [b"b'k' o1"]


@pytest.mark.parametrize("kind", [Struct, Model])
@pytest.mark.parametrize("decode", [None, "json"])
def test_structs_and_models_are_decoded_by_their_own_library(kind: Any, decode: Any) -> None:
    app = make(decode=decode)
    got: list[Any] = []

    def paid(event: Any) -> None:
        got.append(event)

    paid.__annotations__["event"] = kind
    app.on("T")(paid)
    run(app, b'{"order": "o1", "amount": 5, "items": [{"sku": "s"}]}')
    assert got == [kind(order="o1", amount=5, items=[Item("s", 1)])]


@pytest.mark.parametrize(
    ("kind", "value", "complaint"),
    [
        (Plain, GOOD.replace(b'"count": 2', b'"count": "two"'), "no Plain: items.0.count: "),
        (Plain, GOOD.replace(b'"count": 2', b'"count": "2"'), "no Plain: items.0.count: "),
        (
            Plain,
            b"{}",
            "no Plain: order: Field required; amount: Field required; at: Field required; and 1 more",
        ),
        (Plain, b"{", "no Plain: Invalid JSON"),
        (Plain, b"\xff", "no Plain: Invalid JSON"),
        (Plain, b"[]", "no Plain: "),
        (Plain, None, "no Plain: the value is null"),
        (Struct, b'{"order": "o1", "amount": "5"}', "no Struct: Expected `int`, got `str` - at `$.amount`"),
        (Struct, b'{"order": "o1"}', "no Struct: Object missing required field `amount`"),
        (Struct, b"{", "no Struct: Input data was truncated"),
        (Struct, b'"\xff"', "no Struct: "),
        (Struct, None, "no Struct: the value is null"),
        (Model, b'{"order": "o1", "amount": "x"}', "no Model: amount: Input should be a valid integer"),
        (Model, b"{", "no Model: Invalid JSON"),
        (Model, None, "no Model: the value is null"),
    ],
)
@pytest.mark.parametrize("plain", [True, False])
def test_a_violation_is_poison_and_names_the_field(
    kind: Any, value: bytes | None, complaint: str, plain: bool
) -> None:
    app = make()

    async def on_loop(event: Any) -> None:
        raise AssertionError("it must not run")

    def in_thread(event: Any) -> None:
        raise AssertionError("it must not run")

    function = in_thread if plain else on_loop
    function.__annotations__["event"] = kind
    app.on("T")(function)
    (dead,) = run(app, value).dead
    assert dead.message.startswith(complaint), dead.message
    assert (dead.error, dead.stage, dead.attempts) == ("keylane.errors.Poison", function.__name__, 1)
    assert dead.value == value, "the letter has the message as it came"


def test_payload_of_a_stage_comes_from_value_or_previous_stage() -> None:
    app = make()

    @app.stage
    async def first(order: Plain) -> Plain:
        return dataclasses.replace(order, order=order.order + "!")

    @app.stage
    async def second(order: Plain) -> dict[str, Any]:
        assert isinstance(order, Plain)
        return {"sku": order.order, "count": 3}

    @app.stage
    def third(item: Item, msg: Message) -> str:
        return f"{item.sku} {item.count} {msg.offset}"

    result = run(app, GOOD)
    assert [written.value for written in result.results] == [b"o1! 3 0"]


def test_resources_come_by_name_beside_payload_and_message() -> None:
    app = make()

    @app.resource
    def client() -> str:
        return "client"

    @app.on("T")
    async def paid(event: Item, client: str, message) -> str:  # type: ignore[no-untyped-def]  # noqa: ANN001
        return f"{event.sku} {client} {message.offset}"

    app.check()
    assert [written.value for written in run(app, b'{"sku": "s"}').results] == [b"s client 0"]


def test_a_class_made_where_the_app_is_built_is_found() -> None:
    @dataclass
    class Inner:
        number: int

    @dataclass
    class Local:
        inner: Inner

    app = make()

    @app.on("T")
    async def paid(event: Local) -> int:
        return event.inner.number

    assert [written.value for written in run(app, b'{"inner": {"number": 7}}').results] == [b"7"]


# Signatures that make no sense.


async def of_int(event: int) -> None: ...
async def of_union(event: Plain | Item) -> None: ...
async def unknown(event: OrderedDict[str, int]) -> None: ...
async def two_messages(event: Plain, one: Message, two: Message) -> None: ...


@dataclass
class Strange:
    there: OrderedDict[str, int]


async def strange(event: Strange) -> None: ...


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (
            of_int,
            "'event' is annotated with 'int'; the first parameter is the message (keylane.Message), or its payload",
        ),
        (of_union, "a dataclass, a msgspec.Struct or a pydantic model"),
        (unknown, "the type 'OrderedDict[str, int]' of 'event' is not known where the app is built"),
        (two_messages, "'one' and 'two' both ask for the message"),
        (strange, "the payload 'Strange' cannot be decoded: name 'OrderedDict' is not defined"),
    ],
)
def test_payload_impossible_signature_is_refused_at_build(function: Any, complaint: str) -> None:
    for declare in (make().stage, make().on("T")):
        with pytest.raises(SettingsError) as caught:
            declare(function)
        assert complaint in str(caught.value)


def test_payload_as_second_parameter_is_refused() -> None:
    app = make()

    @app.on("T")
    async def paid(msg: Message, event: Plain) -> None: ...

    with pytest.raises(
        SettingsError, match=r"it takes 'event', which is not a resource of the app.*comes first"
    ):
        app.check()


# On the way to the workers.


def test_payload_travels_to_a_worker_without_its_module(tmp_path: Any) -> None:
    (tmp_path / "shop_of_types.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from datetime import datetime\n"
        "from keylane import App\n"
        "@dataclass\n"
        "class Line:\n    at: datetime\n"
        "@dataclass\n"
        "class Order:\n    lines: list[Line]\n"
        "app = App('shop', source='in', sink='out')\n"
        "@app.on('T')\n"
        "async def paid(event: Order) -> str:\n    return str(event.lines[0].at.year)\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        from shop_of_types import app  # type: ignore[import-not-found]  # noqa: PLC0415

        package = pack(app.spec)
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["shop_of_types"]
    (tmp_path / "parcel").write_bytes(pickle.dumps(dataclasses.replace(package, path=())))
    script = (
        "import pickle, sys\n"
        "from keylane.testing import Harness\n"
        "run = Harness(pickle.load(open(sys.argv[1], 'rb')).open())\n"
        'value = b\'{"lines": [{"at": "2026-01-02T03:04:05Z"}]}\'\n'
        "run.send(key=b'k', value=value, headers=[('event-type', b'T')])\n"
        "print(run.run().results[0].value)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "parcel")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert told.stdout.strip() == "b'2026'", told.stderr


def test_payload_struct_that_would_lose_fields_is_not_sent() -> None:
    app = make()

    @app.on("T")
    async def paid(event: Struct) -> None: ...

    with pytest.raises(SettingsError, match="the struct 'Struct' cannot be sent to Spark's workers pickled"):
        pack(app.spec)


def test_payload_imports_no_unused_library() -> None:
    script = (
        "import sys\n"
        "from keylane import App, Message\n"
        "from keylane.testing import Harness\n"
        "app = App('a', source='in', sink='out')\n"
        "@app.stage\n"
        "async def one(msg: Message): return msg.value\n"
        "run = Harness(app)\n"
        "run.send(key=b'k', value=b'')\n"
        "run.run()\n"
        "print(sorted({'pydantic', 'msgspec'} & set(sys.modules)))\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert told.stdout.strip() == "[]", told.stderr
