"""``keylane``: the command line."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from keylane import __version__
from keylane.cli import broker, dlq, lanes, topic
from keylane.cli.bench import bench
from keylane.cli.console import console
from keylane.cli.demo import demo
from keylane.cli.doctor import doctor
from keylane.cli.lag import lag
from keylane.cli.layout import safe
from keylane.cli.metrics import metrics
from keylane.cli.pause import pause, resume
from keylane.cli.plan import plan
from keylane.cli.race import race
from keylane.cli.run import run
from keylane.cli.seed import seed
from keylane.cli.state import app as state
from keylane.cli.verify import verify
from keylane.cli.versions import app as versions
from keylane.errors import KeylaneError

app = typer.Typer(
    name="keylane",
    help=(
        "Kafka messages in Python on Spark: strictly in order inside a key, in parallel across keys.\n\n"
        "New here? Run 'keylane demo'. For your own app: 'keylane broker start', then "
        "'keylane run MODULE:APP'."
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"keylane {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    del version


app.command()(demo)
app.command()(race)
app.command()(run)
app.add_typer(broker.app, name="broker")
app.add_typer(topic.app, name="topic")
app.command()(seed)
app.add_typer(dlq.app, name="dlq")
app.add_typer(lanes.app, name="lanes")
app.add_typer(versions, name="versions")
app.add_typer(state, name="state")
app.command()(pause)
app.command()(resume)
app.command()(plan)
app.command()(verify)
app.command()(lag)
app.command()(console)
app.command()(metrics)
app.command()(doctor)
app.command(context_settings={"ignore_unknown_options": True})(bench)


def main() -> None:
    """Run the command line; an error that a user can act on is one sentence and exit code 2."""
    try:
        app()
    except KeylaneError as error:
        print(safe(f"error: {error}"), file=sys.stderr)  # noqa: T201
        sys.exit(2)
