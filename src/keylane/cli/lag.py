"""``keylane lag``: how far behind an app is, whether it keeps up, and why not."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from keylane.cli.arguments import Bootstrap, Json, Options, app_name, client
from keylane.cli.lag_view import shown
from keylane.cli.layout import safe
from keylane.errors import BrokerError, SettingsError
from keylane.telemetry.lag_monitor import LagMonitor, LagView
from keylane.telemetry.lag_trend import LagTrend
from keylane.telemetry.lag_words import facts
from keylane.telemetry.source_topic import StartingError, find_source

_APP_OBSERVED_SECONDS = 3.0
_GROUP_OBSERVED_SECONDS = 6.0
"""Most clients commit every five seconds."""
_CODES = {LagTrend.FALLING_BEHIND: 1, LagTrend.STUCK: 3, LagTrend.NOT_RUNNING: 3}


def lag(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[APP]", help="The app's name.", show_default=False, callback=app_name),
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="Instead of an app: any Kafka group, together with --topic.")
    ] = None,
    topic: Annotated[str | None, typer.Option(help="The topic. Not needed for an app that has run.")] = None,
    bootstrap: Bootstrap = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    over: Annotated[
        float | None,
        typer.Option(
            min=0.2, metavar="SECONDS", help="How long to measure rates: 3 by default, 6 for a group."
        ),
    ] = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Show how far behind an app is, by partition: lag, rates, time to catch up, and the oldest message not done.

    The state is idle, keeping up, catching up, falling behind, stuck or not running, with the reason: a blocked lane,
    a retry, an open breaker, a hot key. Stuck means no progress for longer than 30 s and than three times the slowest
    message. A slow stage is not stuck.

    \b
    Exit codes:
      0  idle, keeping up, catching up, or starting. Also with parked lanes and dead letters, which do not
         delay others: the first line counts them, and --json has them in "lanes" and "dead_letters"
      1  falling behind
      2  wrong usage, or no broker
      3  stuck, or not running while messages wait

    \b
    keylane lag chat
    keylane lag chat --watch
    keylane lag chat --json | jq '.partitions[] | select(.state == "stuck")'
    keylane lag --group billing --topic orders
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    if (name is None) == (group is None):
        raise SettingsError("expected an APP, or --group GROUP --topic TOPIC")
    if group is not None and topic is None:
        raise SettingsError(f"--group {group} needs --topic TOPIC, the topic that the group reads")
    settings = client(bootstrap, option)
    who = group or str(name)
    try:
        source = topic or find_source(settings, who)
    except StartingError as starting:
        if as_json:
            typer.echo(json.dumps({"group": who, "topic": None, "state": "starting", "why": [str(starting)]}))
        else:
            typer.echo(str(starting))
        raise typer.Exit(0) from None
    watched = LagMonitor(
        settings,
        who,
        source,
        app=group is None,
        over=over or (_APP_OBSERVED_SECONDS if group is None else _GROUP_OBSERVED_SECONDS),
    )
    try:
        if watch:
            _watch(watched, who, source, as_json=as_json)
        else:
            watched.measure()
            time.sleep(over or (_APP_OBSERVED_SECONDS if group is None else _GROUP_OBSERVED_SECONDS))
            view = watched.measure()
            if view is None:
                raise BrokerError("the broker did not answer two requests")
            if as_json:
                typer.echo(json.dumps(facts(who, source, view)))
            else:
                console = _console()
                console.print(shown(who, source, view, console.width))
            raise typer.Exit(_CODES.get(view.pace, 0))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    finally:
        watched.close()


def _watch(watched: LagMonitor, who: str, source: str, *, as_json: bool) -> None:
    """Refresh until Ctrl-C. An unreachable broker is shown as a line; it does not end the command."""
    if as_json:
        while True:
            view = _measure(watched)
            if isinstance(view, LagView):
                typer.echo(json.dumps(facts(who, source, view)))
            elif view is not None:
                typer.echo(safe(view), err=True)
            time.sleep(1)
    console, last = _console(), None
    try:
        # On an alternate screen: after Ctrl-C only the last frame remains.
        with Live(
            f"{who} on {source}: measuring …",
            console=console,
            auto_refresh=False,
            screen=console.is_terminal,
        ) as live:
            while True:
                view = _measure(watched)
                if view is not None:
                    last = shown(who, source, view, console.width) if isinstance(view, LagView) else view
                    live.update(last, refresh=True)
                time.sleep(1)
    finally:
        if console.is_terminal and last is not None:
            console.print(last)


def _measure(watched: LagMonitor) -> LagView | str | None:
    try:
        return watched.measure()
    except BrokerError as error:
        return safe(f"{error}; retrying")


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)
