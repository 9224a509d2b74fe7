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
from keylane.cli.letter_view import print_letter, print_list
from keylane.cli.redrive import redrive
from keylane.dlq.facts import letter_facts, list_facts
from keylane.dlq.reader import read_dead_letters
from keylane.dlq.record import DeadLetter, UnreadableDeadLetter
from keylane.dlq.summary import DeadLetterSummary
from keylane.errors import BrokerError, KeylaneError, SettingsError
from keylane.kafka.settings import KafkaSettings
from keylane.key_text import parse_key, show_key
from keylane.state.admin import known_dead_letters
from keylane.topic_names import dead_letter_topic

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
        str | None, typer.Option(help="Only this key: text, or hex:… for bytes that are not text.")
    ] = None,
    stage: Stage = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    kind: OfKind = None,
    letters: Annotated[
        bool,
        typer.Option(
            "--letters",
            help="List dead letters instead of causes: each lane in order, the newest lane first.",
        ),
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many lines.")] = 50,
    every: Annotated[bool, typer.Option("--all", help="Include redriven dead letters.")] = False,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Show what failed and why: the dead letters by cause, the most frequent first.

    Dead letters have the same cause when stage, error class and message are equal, except for numbers in the message.
    EXAMPLE is the position of one of them in APP.dlq, for 'keylane dlq show'; CAUSE is its error. A message that was
    parked behind another one has that message's cause.

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
    facts = known_dead_letters(settings, name)
    survey = DeadLetterSummary(selection, facts.redriven, every=every, keep=limit if letters else 0)
    for each in read_dead_letters(settings, dead_letter_topic(name)):
        survey.add(facts.home.check(each))
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
        typer.Argument(metavar="PARTITION@OFFSET", help="Its position in APP.dlq.", show_default=False),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(metavar="PARTITION@OFFSET", help="The position of its message in the source."),
    ] = None,
    bootstrap: Bootstrap = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Write the value to stdout, byte for byte, and nothing else.")
    ] = False,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Show one dead letter: its error, each attempt, the traceback, and the original message.

    When a message has several dead letters, --source shows the newest and lists the others.

    \b
    keylane dlq show chat 3@17
    keylane dlq show chat --source 3@1042
    keylane dlq show chat 3@17 --raw > value.bin
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    if (position is None) == (source is None):
        raise SettingsError(
            "expected one dead letter: give its PARTITION@OFFSET in the dead-letter topic, or --source"
        )
    if raw and as_json:
        raise SettingsError("give --raw or --json, not both")
    settings = client(bootstrap, option)
    if position is not None:
        found = _at(settings, name, *place(position))
        others: list[DeadLetter] = []
    else:
        *others, found = _from(settings, name, *place(source or ""))
    if raw:
        if found.value is None:
            raise KeylaneError(f"dead letter {name}.dlq/{found.position} has no value: it is a tombstone")
        sys.stdout.buffer.write(found.value)
        sys.stdout.buffer.flush()
        return
    facts = known_dead_letters(settings, name)
    redriven = found.offset in facts.redriven.get(found.partition, ())
    checked = facts.home.check(found)
    foreign = (
        checked.reason
        if isinstance(found, DeadLetter) and isinstance(checked, UnreadableDeadLetter)
        else None
    )
    if as_json:
        typer.echo(json.dumps({**letter_facts(found, others, redriven=redriven), "foreign": foreign}))
    else:
        print_letter(name, found, others, redriven=redriven, foreign=foreign)


app.command()(redrive)


def _at(settings: KafkaSettings, name: str, partition: int, offset: int) -> DeadLetter | UnreadableDeadLetter:
    found = read_dead_letters(
        settings,
        dead_letter_topic(name),
        partitions=[partition],
        start={partition: offset},
        end={partition: offset + 1},
    )
    for letter in found:
        return letter
    raise BrokerError(
        f"no dead letter at {name}.dlq/{partition}@{offset}: the partition ends before it, or retention deleted it. "
        f"'keylane dlq list {name} --letters' lists those that exist"
    )


def _from(settings: KafkaSettings, name: str, partition: int, offset: int) -> list[DeadLetter]:
    """Return the dead letters of one message, the newest last; they are in the partition of the same number."""
    found = [
        each
        for each in read_dead_letters(settings, dead_letter_topic(name), partitions=[partition])
        if isinstance(each, DeadLetter) and (each.source_partition, each.source_offset) == (partition, offset)
    ]
    if not found:
        raise BrokerError(f"app {name!r} has no dead letter for {partition}@{offset} of its source")
    return found
