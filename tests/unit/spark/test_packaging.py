from __future__ import annotations

import sys
import threading
from textwrap import dedent
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from pyspark import cloudpickle

from keylane import App, Message, SettingsError
from keylane.spark.packaging import AppPackage, load, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from keylane.spec import AppSpec

    Write = Callable[[str], str]

CHAT = """
from keylane import App

SUFFIX = "!"
app = App("chat", source="chat.in", sink="chat.out")
number = 5

@app.stage
async def shout(msg):
    return louder(msg.value)

def louder(value):
    return value + SUFFIX

class Holder:
    inner = app
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module that can be imported; returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def make(source: str) -> str:
        name = f"app_{uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(dedent(source))
        names.append(name)
        return name

    yield make
    for name in names:
        sys.modules.pop(name, None)


def complaint(reference: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load(reference)
    return str(caught.value)


# By its import path.


def test_an_app_is_loaded_by_module_and_attribute(write: Write) -> None:
    name = write(CHAT)
    app = load(f"{name}:app")
    assert app.name == "chat"
    assert load(f"{name}:Holder.inner") is app
    assert AppPackage(reference=f"{name}:app").open() is app


@pytest.mark.parametrize("reference", ["", "chat", "chat:", ":app", ":"])
def test_a_reference_needs_both_parts(reference: str) -> None:
    assert "expected MODULE:APP" in complaint(reference)


def test_missing_module_is_named(write: Write) -> None:
    assert "module 'no_such_module' was not found" in complaint("no_such_module:app")
    assert "module 'no_such_package' was not found" in complaint("no_such_package.chat:app")
    name = write(CHAT)
    assert f"module '{name}.chat' was not found" in complaint(f"{name}.chat:app")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import no_such_client", "No module named 'no_such_client'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def :", "SyntaxError"),
        ("import sys; sys.exit('usage: chat FILE')", "SystemExit: usage: chat FILE"),
        ("from keylane import App\napp = App('a b', source='x')", "SettingsError: App: name must be"),
    ],
)
def test_a_module_that_does_not_import_says_why(write: Write, source: str, why: str) -> None:
    name = write(source)
    message = complaint(f"{name}:app")
    assert f"could not import module {name!r}" in message
    assert why in message


def test_packaging_missing_attribute_lists_the_apps(write: Write) -> None:
    name = write(CHAT)
    assert complaint(f"{name}:ap") == f"'{name}:ap': module {name!r} has no 'ap'; its apps are: app"
    assert "has no 'app.x'" in complaint(f"{name}:app.x")
    empty = write("")
    assert complaint(f"{empty}:app").endswith("it declares no app")


def test_object_that_is_not_an_app_is_refused(write: Write) -> None:
    name = write(CHAT)
    assert complaint(f"{name}:number") == f"'{name}:number': expected an App, got a int"
    assert "expected an App, got a type" in complaint(f"{name}:Holder")


# Pickled.


async def call(app: AppSpec, value: object) -> object:
    class Fake:
        def __init__(self) -> None:
            self.value = value

    return await app.stages[0].function(Fake())


def run(app: AppSpec, value: object) -> object:
    """What the first stage makes of a value, without a loop: it does not wait."""
    coroutine = call(app, value)
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    return ended.value.value


def elsewhere(package: AppPackage, *gone: str, monkeypatch: pytest.MonkeyPatch) -> AppSpec:
    """Opens a parcel as a worker would on which these modules do not exist."""
    for name in gone:
        monkeypatch.setitem(sys.modules, name, None)
    return AppPackage(pickled=package.pickled).open()


def test_an_app_whose_module_is_not_installed_travels_with_it(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write(CHAT)
    package = pack(load(f"{name}:app"))
    app = elsewhere(package, name, monkeypatch=monkeypatch)
    assert (app.name, app.source, app.sink) == ("chat", "chat.in", "chat.out")
    assert run(app, "hello") == "hello!"


def test_a_partial_stage_travels_too(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    name = write(
        """
        import functools
        from keylane import App

        app = App("chat", source="chat.in")

        async def greet(greeting, msg):
            return greeting + msg.value

        app.stage(functools.partial(greet, "hi "))
        """
    )
    app = elsewhere(pack(load(f"{name}:app")), name, monkeypatch=monkeypatch)
    assert run(app, "anna") == "hi anna"


def test_decode_and_observer_travel_too(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    name = write(
        """
        from keylane import App

        class Watcher:
            def started(self, message, attempt): ...
            def ended(self, message, attempt, outcome): return "seen"

        def upper(value):
            return value.upper()

        app = App("chat", source="chat.in", decode=upper, observer=Watcher())

        @app.stage
        async def nothing(msg): ...
        """
    )
    app = elsewhere(pack(load(f"{name}:app")), name, monkeypatch=monkeypatch)
    assert callable(app.decode)
    assert app.decode(b"x") == b"X"
    assert app.observer is not None
    assert app.observer.ended(None, 1, "ok") == "seen"  # type: ignore[arg-type, func-returns-value]


def test_packaging_local_app_travels_with_its_closure(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App("chat", source="chat.in")
    suffix = "?"

    @app.stage
    async def ask(msg: Message) -> str:
        return f"{msg.value}{suffix}"

    assert run(elsewhere(pack(app.spec), __name__, monkeypatch=monkeypatch), "why") == "why?"


def test_packing_keeps_the_users_registrations(write: Write) -> None:
    name = write(CHAT)
    app = load(f"{name}:app")
    cloudpickle.register_pickle_by_value(sys.modules[name])  # type: ignore[no-untyped-call]
    try:
        pack(app)
        assert name in cloudpickle.list_registry_pickle_by_value()  # type: ignore[no-untyped-call]
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[name])  # type: ignore[no-untyped-call]
    pack(app)
    assert name not in cloudpickle.list_registry_pickle_by_value()  # type: ignore[no-untyped-call]


def test_packaging_app_with_a_lock_is_refused_with_advice() -> None:
    app = App("chat", source="chat.in")
    lock = threading.Lock()

    @app.stage
    def count(msg: Message) -> None:
        with lock:
            pass

    with pytest.raises(SettingsError) as caught:
        pack(app.spec)
    message = str(caught.value)
    assert "app 'chat' cannot be sent to Spark's workers" in message
    assert "lock" in message
    assert "make them resources (@app.resource)" in message


def test_a_module_that_the_worker_lacks_is_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = write("def help(value): return value")
    name = write(
        f"""
        from keylane import App
        from {helper} import help

        app = App("chat", source="chat.in")

        @app.stage
        async def call(msg):
            return help(msg.value)
        """
    )
    package = pack(load(f"{name}:app"))
    with pytest.raises(SettingsError, match=f"needs a module that the worker does not have.*{helper}"):
        elsewhere(package, name, helper, monkeypatch=monkeypatch)


def test_the_drivers_folders_are_looked_into_on_the_same_machine(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write(CHAT)
    package = pack(load(f"{name}:app"))
    assert str(tmp_path) in package.path
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    sys.modules.pop(name)
    opened = AppPackage(reference=f"{name}:app", path=(str(tmp_path), str(tmp_path / "missing"))).open()
    assert opened.name == "chat"
    assert str(tmp_path / "missing") not in sys.path


def test_a_parcel_with_something_else_in_it_is_refused() -> None:
    with pytest.raises(SettingsError, match="expected an App on the worker, got a int"):
        AppPackage(pickled=cloudpickle.dumps(5)).open()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("given", ["./shop.py:app", "shop.py:app", "apps/shop.py:app", "/srv/apps/shop:app"])
def test_file_in_place_of_a_module_is_explained(given: str) -> None:
    with pytest.raises(
        SettingsError, match=r"expected a module's name, not its file\. Run 'keylane run shop:app'"
    ):
        load(given)


def test_failed_import_names_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep_one.py").write_text("import deep_two\n")
    (tmp_path / "deep_two.py").write_text("import json\n\njson.loads('{')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingsError, match=r"JSONDecodeError: .* \(at .*deep_two.py, line 3\)"):
        load("deep_one:app")
    (tmp_path / "deep_three.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(SettingsError, match=r"SyntaxError: .*deep_three.py, line 2"):
        load("deep_three:app")
