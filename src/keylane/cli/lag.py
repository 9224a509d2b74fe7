"""``keylane lag``: how far behind an app is, whether it keeps up, and what holds it up."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from keylane.cli.arguments import Bootstrap, Json, Options, client
from keylane.cli.lag_view import facts, shown
from keylane.cli.source import find_source
from keylane.core.pace import Pace
from keylane.errors import KafkaError, SettingsError
from keylane.kafka.lag_watch import LagView, LagWatch

_OF_AN_APP = 3.0
_OF_A_GROUP = 6.0
"""Most clients commit every five seconds."""
_CODES = {Pace.FALLING_BEHIND: 1, Pace.STUCK: 3}


def lag(
    name: Annotated[
        str | None, typer.Argument(metavar="[APP]", help="The app's name.", show_default=False)
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="Instead of an app: any Kafka group, whose --topic is named.")
    ] = None,
    topic: Annotated[
        str | None, typer.Option(help="The topic; of an app it is known, once it has run.")
    ] = None,
    bootstrap: Bootstrap = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")] = False,
    over: Annotated[
        float | None,
        typer.Option(min=0.2, metavar="SECONDS", help="Measure rates over so long: 3, or 6 for a group."),
    ] = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Show how far behind an app is, by partition: lag, rates, time to catch up, and the oldest message not done.

    Says in words whether it is idle, keeping up, catching up, falling behind or stuck, and on what: a lane that is
    blocked, a message that is retried, a breaker that is open, a hot key, no task that runs.

    \b
    Exit codes:
      0  idle, keeping up or catching up
      1  falling behind
      2  wrong usage, or no broker
      3  stuck

    \b
    keylane lag chat
    keylane lag chat --watch
    keylane lag chat --json | jq '.partitions[] | select(.state == "stuck")'
    keylane lag --group billing --topic orders
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    if (name is None) == (group is None):
        raise SettingsError("say whose lag: an APP, or --group GROUP --topic TOPIC")
    if group is not None and topic is None:
        raise SettingsError(f"--group {group}: needs --topic TOPIC, the topic that the group reads")
    settings = client(bootstrap, option)
    who = group or str(name)
    source = topic or find_source(settings, who)
    watched = LagWatch(
        settings, who, source, app=group is None, over=over or (_OF_AN_APP if group is None else _OF_A_GROUP)
    )
    try:
        if watch:
            _watch(watched, who, source, as_json=as_json)
        else:
            watched.look()
            time.sleep(over or (_OF_AN_APP if group is None else _OF_A_GROUP))
            view = watched.look()
            if view is None:
                raise KafkaError("the broker gave no answer twice")
            if as_json:
                typer.echo(json.dumps(facts(who, source, view)))
            else:
                _console().print(shown(who, source, view))
            raise typer.Exit(_CODES.get(view.pace, 0))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    finally:
        watched.close()


def _watch(watched: LagWatch, who: str, source: str, *, as_json: bool) -> None:
    """Until Ctrl-C. A broker that is away is a line, not the end."""
    if as_json:
        while True:
            view = _look(watched)
            if isinstance(view, LagView):
                typer.echo(json.dumps(facts(who, source, view)))
            elif view is not None:
                typer.echo(view, err=True)
            time.sleep(1)
    with Live(f"{who} on {source}: measuring …", console=_console(), auto_refresh=False) as live:
        while True:
            view = _look(watched)
            if view is not None:
                live.update(shown(who, source, view) if isinstance(view, LagView) else view, refresh=True)
            time.sleep(1)


def _look(watched: LagWatch) -> LagView | str | None:
    try:
        return watched.look()
    except KafkaError as error:
        return f"{error}; asked again"


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)
