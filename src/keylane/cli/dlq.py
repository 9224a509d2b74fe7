"""`keylane dlq list|show|redrive`: the dead letters of an app."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer

from keylane.cli.arguments import (
    App,
    Bootstrap,
    Error,
    Json,
    OfKind,
    Options,
    Since,
    Stage,
    Until,
    client,
    place,
    select,
)
from keylane.cli.keys import parse_key, show_key
from keylane.cli.letter_view import letter_facts, list_facts, print_letter, print_list
from keylane.cli.redrive import redrive
from keylane.cli.survey import Survey
from keylane.errors import KafkaError, KeylaneError, SettingsError
from keylane.kafka.letter import Letter, Unreadable
from keylane.kafka.letters import read_letters, redriven_offsets
from keylane.kafka.settings import KafkaSettings

app = typer.Typer(
    name="dlq",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Dead letters: messages that could not be processed, and why.",
)


@app.command("list")
def list_(
    name: App,
    bootstrap: Bootstrap = None,
    key: Annotated[
        str | None, typer.Option(help="Only this key: text, or hex:… for bytes that are no text.")
    ] = None,
    stage: Stage = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    kind: OfKind = None,
    letters: Annotated[
        bool, typer.Option("--letters", help="Single letters, the newest first, instead of causes.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many lines.")] = 50,
    every: Annotated[bool, typer.Option("--all", help="Also those that were redriven.")] = False,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Show what failed and why: the letters by cause, the most frequent first.

    Letters have one cause when stage, class and message are the same, numbers in the message aside. EXAMPLE is where
    one of them lies: 'keylane dlq show' tells all about it. What was parked behind a message has that message's cause.

    \b
    keylane dlq list chat
    keylane dlq list chat --since 2h --stage answer
    keylane dlq list chat --key user-17 --letters
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    selection = select(
        time.time(),
        key=None if key is None else parse_key(key),
        stage=stage,
        error=error,
        since=since,
        until=until,
        kind=kind,
    )
    settings = client(bootstrap, option)
    survey = Survey(selection, redriven_offsets(settings, name), every=every, keep=limit if letters else 0)
    for each in read_letters(settings, f"{name}.dlq"):
        survey.add(each)
    if selection.key is not None and not survey.key_met:
        raise KeylaneError(f"no dead letter of app {name!r} has the key {show_key(selection.key)}")
    if as_json:
        typer.echo(json.dumps(list_facts(name, survey, limit, letters=letters)))
    else:
        print_list(name, survey, limit, letters=letters)


@app.command()
def show(
    name: App,
    position: Annotated[
        str | None,
        typer.Argument(metavar="PARTITION/OFFSET", help="Its place in APP.dlq.", show_default=False),
    ] = None,
    source: Annotated[
        str | None, typer.Option(metavar="PARTITION/OFFSET", help="The place of its message in the source.")
    ] = None,
    bootstrap: Bootstrap = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Write the value to stdout, byte for byte, and nothing else.")
    ] = False,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Show all about one letter: why it is dead, each attempt, the traceback, and the message as it came.

    When a message died more than once, --source shows its newest letter and names the others.

    \b
    keylane dlq show chat 3/17
    keylane dlq show chat --source 3/1042
    keylane dlq show chat 3/17 --raw > value.bin
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    if (position is None) == (source is None):
        raise SettingsError("say which letter: its PARTITION/OFFSET in the dead-letter topic, or --source")
    if raw and as_json:
        raise SettingsError("give --raw or --json, not both")
    settings = client(bootstrap, option)
    if position is not None:
        found = _at(settings, name, *place(position))
        others: list[Letter] = []
    else:
        *others, found = _from(settings, name, *place(source or ""))
    if raw:
        if found.value is None:
            raise KeylaneError(f"letter {found.position} of app {name!r} has no value: it is a tombstone")
        sys.stdout.buffer.write(found.value)
        sys.stdout.buffer.flush()
        return
    redriven = found.offset in redriven_offsets(settings, name).get(found.partition, ())
    if as_json:
        typer.echo(json.dumps(letter_facts(found, others, redriven=redriven)))
    else:
        print_letter(name, found, others, redriven=redriven)


app.command()(redrive)


def _at(settings: KafkaSettings, name: str, partition: int, offset: int) -> Letter | Unreadable:
    span = {"start": {partition: offset}, "upto": {partition: offset + 1}}
    for letter in read_letters(settings, f"{name}.dlq", partitions=[partition], **span):
        return letter
    raise KafkaError(
        f"nothing lies at {partition}/{offset} of topic '{name}.dlq': it ends before, or it was deleted by its age. "
        f"'keylane dlq list {name} --letters' shows what is there"
    )


def _from(settings: KafkaSettings, name: str, partition: int, offset: int) -> list[Letter]:
    """The letters of one message, the newest last: they lie in the partition that it lay in."""
    found = [
        each
        for each in read_letters(settings, f"{name}.dlq", partitions=[partition])
        if isinstance(each, Letter) and (each.source_partition, each.source_offset) == (partition, offset)
    ]
    if not found:
        raise KafkaError(f"no dead letter of app {name!r} came from {partition}/{offset} of its source")
    return found
