"""What several commands take: the app, the broker, which dead letters, positions and times."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated

import typer

from keylane.cli.survey import Selection
from keylane.errors import SettingsError
from keylane.kafka.letter import Kind
from keylane.kafka.settings import KafkaSettings

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

App = Annotated[
    str, typer.Argument(metavar="APP", help="The app's name, as its topics APP.dlq and APP.state have it.")
]
Bootstrap = Annotated[
    str | None,
    typer.Option(
        envvar="KEYLANE_BOOTSTRAP", help="The broker's address, host:port. Or set KEYLANE_BOOTSTRAP."
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="A setting for the Kafka client, e.g. -o kafka.security.protocol=SSL",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]

Stage = Annotated[str | None, typer.Option(help="Only those that failed in this stage.")]
Error = Annotated[
    str | None, typer.Option(help="Only this class of error, e.g. TimeoutError or shop.bank.Refused.")
]
Since = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Only those that failed then or later: 30m, 2h, 7d, or a time."),
]
Until = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Only those that failed before: 2h, or 2026-11-16T10:00."),
]
OfKind = Annotated[
    Kind | None, typer.Option(help="Only those whose lane went on, stands still, or was parked.")
]


def client(bootstrap: str | None, option: list[str] | None) -> KafkaSettings:
    """How to reach the broker, from the command line. Raises SettingsError."""
    if not bootstrap:
        raise SettingsError(
            "no broker given: use --bootstrap host:9092 or set KEYLANE_BOOTSTRAP. "
            "'keylane broker start' starts one on this machine"
        )
    extra = []
    for pair in option or ():
        setting, equals, value = pair.partition("=")
        if not equals or not setting.startswith("kafka."):
            raise SettingsError(
                f"--option {pair!r}: needs kafka.NAME=VALUE, e.g. kafka.security.protocol=SSL"
            )
        extra.append((setting.removeprefix("kafka."), value))
    return KafkaSettings(bootstrap, tuple(sorted(extra)))


def select(
    now: float,
    *,
    key: bytes | None = None,
    stage: str | None,
    error: str | None,
    since: str | None,
    until: str | None,
    kind: Kind | None,
) -> Selection:
    """Which letters are meant. Raises SettingsError for times that make no sense."""
    selection = Selection(
        key=key,
        stage=stage,
        error=error,
        since=None if since is None else moment(since, now, "--since"),
        until=None if until is None else moment(until, now, "--until"),
        kind=kind,
    )
    if selection.since is not None and selection.until is not None and selection.since >= selection.until:
        raise SettingsError(f"--since {since} is not before --until {until}: no letter can be in between")
    return selection


def moment(text: str, now: float, what: str) -> float:
    """Unix seconds of a time, or of so long ago; a time without a zone is local. Raises SettingsError."""
    ago = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)([smhdw])", text)
    if ago:
        return now - float(ago[1]) * _UNITS[ago[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise SettingsError(
            f"{what} {text!r}: needs how long ago (30m, 2h, 7d) or a time (2026-11-16T10:00 is local, …Z is UTC)"
        ) from None


def place(text: str) -> tuple[int, int]:
    """Partition and offset. Raises SettingsError."""
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,18})", text)
    if found is None:
        raise SettingsError(f"{text!r} is no position: needs PARTITION/OFFSET, such as 3/17")
    return int(found[1]), int(found[2])
