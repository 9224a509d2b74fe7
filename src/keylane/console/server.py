"""The console's web server: binds its address, watches the apps, and answers browsers until closed."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from typing import TYPE_CHECKING, Self

import uvicorn

from keylane.console.access import Access, allowed_hosts
from keylane.console.actions import Actions, CommandWriter
from keylane.console.hub import Hub
from keylane.console.letters import LetterDesk
from keylane.console.routes import Race, Routes
from keylane.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from keylane.kafka.settings import KafkaSettings

HOST = "127.0.0.1"
PORT = 8600
_START_SECONDS = 10.0
_CONNECTIONS_MAX = 300


class ConsoleServer:
    """One console, in threads of its own. Raises SettingsError if it cannot listen there.

    ``announce`` gets each one-time link: the first one now, a new one when a link has been used.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        names: Sequence[str] = (),
        *,
        host: str = HOST,
        port: int = PORT,
        allow_hosts: Sequence[str] = (),
        allow_actions: bool = False,
        trust_header: str = "",
        announce: Callable[[str], None] = lambda _link: None,
        race: Race | None = None,
    ) -> None:
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104
        self.address = f"http://{shown}:{self.port}"
        access = Access(
            hosts=allowed_hosts(host, self.port, tuple(allow_hosts)),
            trust_header=trust_header,
            announce=lambda path: announce(self.address + path),
        )
        self.link = self.address + access.login_path()
        """The first one-time link."""
        self.hub = Hub(settings, names)
        self._actions = Actions(settings, CommandWriter(allowed=allow_actions))
        self._letters = LetterDesk(self.hub)
        routes = Routes(self.hub, self._actions, self._letters, race=race)
        self._server = uvicorn.Server(
            uvicorn.Config(
                routes.app(access, f"keylane_console_{self.port}"),
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                loop="asyncio",
                http="h11",
                ws="none",
                limit_concurrency=_CONNECTIONS_MAX,
                timeout_graceful_shutdown=1,
                log_config=None,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="keylane-console", daemon=True
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start to watch and to answer."""
        self.hub.start()
        self._thread.start()
        deadline = time.monotonic() + _START_SECONDS
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self) -> None:
        """Stop answering, and end all threads."""
        self._server.should_exit = True
        self._thread.join(5)
        self._socket.close()
        self.hub.close()
        self._actions.close()
        self._letters.close()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except (OSError, OverflowError) as error:
        made.close()
        raise SettingsError(
            f"cannot serve the console at {host}:{port}: {error}; choose another port with --port"
        ) from error
    return made
