"""``keylane console``: a web page for all apps of a broker."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Annotated

import typer

from keylane.cli.arguments import Bootstrap, Options, client
from keylane.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from keylane.console.server import ConsoleServer
    from keylane.kafka.settings import KafkaSettings

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8600


def console(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[APP]...", help="Only these apps; by default all that have topics on the broker."
        ),
    ] = None,
    bootstrap: Bootstrap = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to serve; 0 takes any free one.")
    ] = DEFAULT_PORT,
    host: Annotated[
        str, typer.Option(help="Address to serve; 0.0.0.0 means all addresses of this machine.")
    ] = DEFAULT_HOST,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A further name by which browsers may call it, such as console.example.org."
        ),
    ] = None,
    allow_actions: Annotated[
        bool,
        typer.Option("--allow-actions", help="Let users release, skip and redrive; otherwise it only shows."),
    ] = False,
    trust_header: Annotated[
        str,
        typer.Option(
            metavar="HEADER",
            help="A header in which a proxy in front names the user, such as X-Forwarded-User.",
            show_default=False,
        ),
    ] = "",
    option: Options = None,
) -> None:
    """Serve a web page that shows every app: its health, lanes, stopped lanes and dead letters, until Ctrl-C.

    It needs the broker only, not the machines that run the apps: it reads the topics that apps write. Open the link
    that it prints. The link works once; then a new one is printed, for another browser.

    Everybody with a link sees keys, errors and, on request, the contents of dead letters. Without --allow-actions
    nobody can change anything. It serves this machine only, and there is no encryption: for others, put a proxy with
    TLS and a login in front, and name it with --allow-host and --trust-header. With --trust-header whoever reaches the
    port directly can claim any name, so let only the proxy reach it.

    \b
    keylane console
    keylane console chat billing --port 8700
    keylane console --allow-actions
    keylane console --allow-host console.example.org --trust-header X-Forwarded-User
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    settings = client(bootstrap, option)
    server = make_server(
        settings,
        names or [],
        host=host,
        port=port,
        allow_hosts=allow_host or [],
        allow_actions=allow_actions,
        trust_header=trust_header,
    )
    from keylane.console.server import is_loopback  # noqa: PLC0415 - needs the extra

    with server:
        typer.echo(
            f"console of {settings.bootstrap}, {'with' if allow_actions else 'without'} actions: {server.link}"
        )
        if not is_loopback(host):
            typer.echo(f"other machines can reach {host}, and nothing is encrypted", err=True)
        typer.echo("stop with Ctrl-C", err=True)
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            pass


def make_server(
    settings: KafkaSettings, names: list[str], *, say: Callable[[str], None] = typer.echo, **more: Any
) -> ConsoleServer:
    """Return a console. Raises SettingsError if its packages are missing, or if it cannot listen there."""
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise SettingsError(
                f"the console needs the package {package}, which is not installed: pip install 'keylane[console]'"
            )
    from keylane.console.server import ConsoleServer  # noqa: PLC0415 - needs the extra

    return ConsoleServer(
        settings, names, announce=lambda link: say(f"this link was used; for another browser: {link}"), **more
    )
