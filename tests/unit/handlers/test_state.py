"""States as parameters, and their values as JSON."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import pydantic
import pytest

from keylane import App, Message, Poison, SettingsError, State
from keylane.handlers.state import StateCodec, StateSpec


@dataclass(frozen=True)
class Chat:
    count: int = 0
    items: tuple[str, ...] = ()


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(populate_by_name=False)
    total: int = pydantic.Field(default=0, alias="Total")


class Struct(msgspec.Struct):
    total: int = 0


class Needs(pydantic.BaseModel):
    name: str


def codec(kind: Any, **options: Any) -> StateCodec:
    return StateSpec(name="chat", **options).typed(kind, "App 'a'", {}).codec()


def opened(kind: Any, content: bytes | None = None, **options: Any) -> State[Any]:
    return State(codec(kind, **options), b"anna", content)


@pytest.mark.parametrize(
    ("kind", "value", "content"),
    [
        (Chat, Chat(2, ("a",)), b'{"count":2,"items":["a"]}'),
        (Model, Model(Total=3), b'{"Total":3}'),
        (Struct, Struct(total=3), b'{"total":3}'),
        (dict[str, int], {"a": 1}, b'{"a":1}'),
        (list[str], ["é"], '["é"]'.encode()),
        (int, 7, b"7"),
        (str, "text", b'"text"'),
        (Any, {"a": [1, None]}, b'{"a":[1,null]}'),
    ],
)
def test_value_is_stored_as_json_and_read_back(kind: Any, value: Any, content: bytes) -> None:
    state = opened(kind)
    state.value = value
    assert state.close() == content
    assert opened(kind, content).value == value


@pytest.mark.parametrize(
    ("kind", "default"), [(Chat, Chat()), (dict[str, int], {}), (int, 0), (Needs, None), (Any, None)]
)
def test_default_is_the_empty_value_of_the_type(kind: Any, default: Any) -> None:
    state = opened(kind)
    assert state.value == default
    assert not state.exists
    assert state.get("none") == "none"
    assert state.close() is False, "nothing is stored because it was read"


def test_default_of_its_own_is_used() -> None:
    assert opened(list[int], default=lambda: [1]).value == [1]


def test_change_in_place_is_stored() -> None:
    state = opened(list[int], b"[1]")
    state.value.append(2)
    assert state.close() == b"[1,2]"
    fresh = opened(dict[str, int])
    fresh.value["a"] = 1
    assert fresh.close() == b'{"a":1}'


def test_value_that_was_only_read_is_not_stored() -> None:
    state = opened(list[int], b"[1]")
    assert state.value == [1]
    assert state.close() is False
    assert opened(int, b"1").close() is False


def test_same_value_is_stored_again_only_to_renew_its_time() -> None:
    for ttl, expected in ((None, False), (10.0, b"1")):
        state = opened(int, b"1", ttl=ttl)
        state.value = 1
        assert state.close() == expected


def test_deleted_value_is_gone() -> None:
    state = opened(int, b"5")
    state.delete()
    assert not state.exists
    assert state.value == 0
    assert state.close() is None
    nothing = opened(int)
    nothing.delete()
    assert nothing.close() is False
    again = opened(int, b"5")
    again.delete()
    again.value = 5
    assert again.exists


def test_stored_value_that_does_not_fit_names_key_and_field() -> None:
    with pytest.raises(
        Poison, match=r"state 'chat' of key b'anna' does not fit Chat: no Chat: count: .*migrate="
    ):
        _ = opened(Chat, b'{"count":"many"}').value
    with pytest.raises(Poison, match=r"state 'chat' of key b'anna' does not fit .*: a: .*integer"):
        _ = opened(dict[str, int], b'{"a":"x"}').value


def test_migration_converts_what_does_not_fit() -> None:
    state = opened(Chat, b'{"total":3}', migrate=lambda old: Chat(old["total"]))
    assert opened(Chat, b'{"total":3}').value == Chat(), "unknown fields are ignored, as in payloads"
    assert state.close() is False
    state = opened(Chat, b"[3]", migrate=lambda old: Chat(old[0]))
    assert state.value == Chat(3)
    assert state.close() == b'{"count":3,"items":[]}', "it is stored in its new form"


def test_migration_that_fails_is_named() -> None:
    with pytest.raises(Poison, match=r"migrate= failed: KeyError"):
        _ = opened(Chat, b"[]", migrate=lambda old: {"a": Chat()}["x"]).value
    with pytest.raises(Poison, match=r"migrate= returned int"):
        _ = opened(Chat, b"[]", migrate=lambda old: 3).value


def test_value_of_another_class_is_refused_at_once() -> None:
    state = opened(Chat)
    with pytest.raises(Poison, match=r"state 'chat' of key b'anna' holds Chat; the stage set dict"):
        state.value = {"count": 1}


@pytest.mark.parametrize(
    ("kind", "value"),
    [(Any, {1, 2}), (Any, object()), (Any, float("nan")), (Any, b"bytes"), (Chat, Chat("x"))],  # type: ignore[arg-type]
)
def test_value_that_is_not_json_is_refused(kind: Any, value: Any) -> None:
    state = opened(kind)
    state.value = value
    with pytest.raises(Poison, match=r"state 'chat' of key b'anna' cannot be stored: "):
        state.close()


def test_value_that_contains_itself_is_refused() -> None:
    state, value = opened(Any), []  # type: ignore[var-annotated]
    value.append(value)
    state.value = value
    with pytest.raises(Poison, match="cannot be stored: "):
        state.close()


def test_value_above_the_limit_is_refused() -> None:
    state = opened(str, max_bytes=100)
    state.value = "x" * 99
    with pytest.raises(
        Poison, match=r"state 'chat' of key b'anna' has 101 bytes, and its limit is 100: .*max_bytes"
    ):
        state.close()


def test_state_is_closed_after_its_attempt() -> None:
    state = opened(int)
    state.discard()
    with pytest.raises(RuntimeError, match="after its attempt had ended"):
        state.value = 1


def test_spec_with_its_type_can_be_pickled() -> None:
    for kind in (Chat, Model, Struct, dict[str, int], Any):
        spec = pickle.loads(pickle.dumps(StateSpec(name="chat").typed(kind, "App 'a'", {})))  # noqa: S301
        assert State(spec.codec(), b"k", None).close() is False


# Declarations.


def app() -> App:
    return App("a", source="in", sink="out")


def test_states_are_declared_by_annotation() -> None:
    found = app()

    @found.stage
    async def answer(msg: Message, chat: State[Chat], n: Annotated[State[int], "total"], any_: State) -> None:  # type: ignore[type-arg]
        pass

    found.check()
    assert {name: spec.type for name, spec in found.spec.states.items()} == {
        "chat": Chat,
        "total": int,
        "any_": Any,
    }
    assert found.spec.stages[0].resources == ()


def test_options_apply_to_the_state_of_that_name() -> None:
    found = app()
    found.lane_state("chat", ttl=5, max_bytes=10)

    @found.stage
    async def answer(msg: Message, chat: State[Chat]) -> None:
        pass

    assert (found.spec.states["chat"].ttl, found.spec.states["chat"].max_bytes) == (5, 10)
    assert found.spec.states["chat"].type is Chat


def test_options_of_a_state_that_no_stage_takes_are_refused() -> None:
    found = app()
    found.lane_state("chta", ttl=5)

    @found.stage
    async def answer(msg: Message, chat: State[Chat]) -> None:
        pass

    with pytest.raises(SettingsError, match=r"no stage takes the state 'chta'; did you mean 'chat'\?"):
        found.check()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"ttl": 0}, "ttl must be seconds above 0"),
        ({"ttl": "1h"}, "ttl must be seconds above 0"),
        ({"default": 3}, "default must be a function"),
        ({"migrate": "x"}, "migrate must be a function"),
        ({"max_bytes": 0}, "max_bytes must be a whole number"),
        ({"max_bytes": 2_000_000}, "max_bytes must be a whole number from 1 to 900,000"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        app().lane_state("chat", **options)


def test_bad_name_is_refused() -> None:
    with pytest.raises(SettingsError, match="name must be 1 to 100 letters"):
        app().lane_state("a/b")


def test_options_are_set_once() -> None:
    found = app()
    found.lane_state("chat")
    with pytest.raises(SettingsError, match="its options are set already"):
        found.lane_state("chat")


def test_two_types_of_one_state_are_refused() -> None:
    found = app()

    @found.stage
    async def first(msg: Message, chat: State[Chat]) -> None:
        pass

    @found.stage
    async def second(msg: Message, chat: State[int]) -> None:
        pass

    with pytest.raises(SettingsError, match="state 'chat' is int, and another stage takes it as Chat"):
        found.check()


def test_type_that_is_not_json_is_refused_when_declared() -> None:
    class Connection:
        pass

    with pytest.raises(SettingsError, match=r"state 'link' cannot be stored: .*Connection is neither"):

        @app().stage
        async def answer(msg: Message, link: State[Connection]) -> None:
            pass


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"order": "none"}, "order='none' there are none"),
        ({"commit": "epoch", "sink": None}, "commit='epoch'"),
    ],
)
def test_apps_that_can_have_no_state_are_refused(settings: dict[str, Any], problem: str) -> None:
    found = App("a", source="in", **{"sink": "out"} | settings)

    @found.stage
    async def answer(msg: Message, chat: State[Chat]) -> None:
        pass

    with pytest.raises(SettingsError, match=problem):
        found.check()


def test_batch_stage_takes_a_list_of_states() -> None:
    with pytest.raises(SettingsError, match=r"'chats' must be annotated with list\[State\[…\]\]"):

        @app().batch_stage
        async def answer(msgs: list[Message], chats: State[Chat]) -> None:
            pass

    with pytest.raises(SettingsError, match=r"'chats' must be annotated with State\[…\]"):

        @app().stage
        async def other(msg: Message, chats: list[State[Chat]]) -> None:
            pass
