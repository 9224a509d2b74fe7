"""The command that serves the console."""

from __future__ import annotations

import importlib.util
import socket
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from keylane.cli.console import DEFAULT_HOST, DEFAULT_PORT, make_server
from keylane.cli.main import app
from keylane.console.server import HOST, PORT, is_loopback
from keylane.errors import SettingsError
from keylane.kafka.settings import KafkaSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS = KafkaSettings("localhost:1")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "uvicorn" else find(name, *more)
    )
    with pytest.raises(SettingsError, match=r"keylane\[console\]"):
        make_server(SETTINGS, [], port=0)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_port_that_is_taken_is_named(taken: int) -> None:
    with pytest.raises(SettingsError, match=f"127.0.0.1:{taken}.*--port"):
        make_server(SETTINGS, [], port=taken)


def test_defaults_are_those_of_the_server() -> None:
    assert (DEFAULT_HOST, DEFAULT_PORT) == (HOST, PORT)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["console"], "no broker address"),
        (["console", "--bootstrap", "x:1", "--allow-host", "a b", "--port", "0"], "--allow-host"),
        (["run", "x:app", "--allow-actions"], "--allow-actions needs --console"),
        (["race", "--web", "--json"], "--web or --json"),
    ],
)
def test_wrong_usage_is_refused(arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEYLANE_BOOTSTRAP", raising=False)
    done: Any = CliRunner().invoke(app, arguments)
    assert done.exit_code
    assert says in str(done.exception)


@pytest.mark.parametrize(
    ("host", "only_here"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("192.0.2.1", False)]
)  # fmt: skip
def test_loopback_is_recognised(host: str, only_here: bool) -> None:
    assert is_loopback(host) is only_here
