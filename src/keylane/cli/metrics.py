"""``keylane metrics``: an app's figures for Prometheus."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from keylane.cli.arguments import App, Bootstrap, Options, client
from keylane.cli.source import find_source
from keylane.kafka.exporter import PORT, Exporter


def metrics(
    name: App,
    bootstrap: Bootstrap = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Serve at this port; 0 takes any.")] = PORT,
    host: Annotated[str, typer.Option(help="Serve at this address of the machine.")] = "0.0.0.0",  # noqa: S104
    once: Annotated[
        bool, typer.Option("--once", help="Print the metrics as they are now, and exit.")
    ] = False,
    topic: Annotated[
        str | None, typer.Option(help="The app's source, when neither its plan nor its telemetry names it.")
    ] = None,
    option: Options = None,
) -> None:
    """Serve an app's figures to Prometheus, from its telemetry and its group, until Ctrl-C.

    It runs beside the app, anywhere that reaches the broker; one for each app. The lag is there also when the app is
    not. Counters count from when this was started. 'keylane run --metrics-port N' serves the same from the driver.

    \b
    keylane metrics chat
    keylane metrics chat --port 9464 --host 127.0.0.1
    keylane metrics chat --once | grep keylane_partition_lag
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    settings = client(bootstrap, option)
    exporter = Exporter(settings, name, topic or find_source(settings, name))
    if once:
        exporter.read()
        typer.echo(exporter.text(), nl=False)
        return
    exporter.start()
    taken = exporter.serve(port, host)
    typer.echo(f"app {name}: http://{host}:{taken}/metrics (Ctrl-C ends it)", err=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        exporter.close()
