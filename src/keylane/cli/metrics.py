"""``keylane metrics``: an app's metrics for Prometheus."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from keylane.cli.arguments import App, Bootstrap, Options, client
from keylane.telemetry.prometheus import HOST, PORT, Exporter
from keylane.telemetry.source_topic import find_source


def metrics(
    name: App,
    bootstrap: Bootstrap = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve; 0 takes any free one.")] = PORT,
    host: Annotated[
        str, typer.Option(help="Address to serve; 0.0.0.0 means all addresses of this machine.")
    ] = HOST,
    once: Annotated[
        bool, typer.Option("--once", help="Print the metrics as they are now, and exit.")
    ] = False,
    topic: Annotated[
        str | None, typer.Option(help="The app's source, if neither its plan nor its telemetry names it.")
    ] = None,
    option: Options = None,
) -> None:
    """Serve an app's metrics to Prometheus, from its telemetry and its group, until Ctrl-C.

    Run one per app, on any machine that reaches the broker. Lag is available even when the app is not running.
    Counters start when this command starts. 'keylane run --metrics-port N' serves the same from the driver. Listens
    on this machine only, unless --host says otherwise: there is no encryption and no authentication.

    \b
    keylane metrics chat
    keylane metrics chat --port 9464 --host 0.0.0.0
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
    typer.echo(f"app {name}: http://{host}:{taken}/metrics (stop with Ctrl-C)", err=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        exporter.close()
