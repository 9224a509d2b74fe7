"""Arguments shared by several commands: app, broker, dead-letter filters, positions and times."""

from __future__ import annotations

import re
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keylane.dlq.record import DeadLetterKind
from keylane.dlq.summary import DeadLetterFilter
from keylane.errors import SettingsError
from keylane.kafka.settings import client_settings
from keylane.redaction import is_secret
from keylane.safe_text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from keylane.kafka.settings import KafkaSettings

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def app_name(given: str | None) -> str | None:
    """Return an app's name: as given, or of the app at MODULE:APP. Raises SettingsError if that does not import."""
    if given is None or ":" not in given:
        return given
    from keylane.spark.packaging import load  # noqa: PLC0415 - takes half a second; a plain name needs nothing of it

    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    return load(given).name


App = Annotated[
    str,
    typer.Argument(
        metavar="APP",
        help="The app's name, as in its topics APP.dlq and APP.state; or MODULE:APP.",
        callback=app_name,
    ),
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
        help="A setting for the Kafka client, e.g. -o kafka.security.protocol=SSL; @FILE reads settings from a file.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]

Reason = Annotated[
    str, typer.Option(metavar="TEXT", help="Why you do it; kept in the audit.", show_default=False)
]

Stage = Annotated[str | None, typer.Option(help="Only dead letters that failed in this stage.")]
Error = Annotated[
    str | None, typer.Option(help="Only this class of error, e.g. TimeoutError or shop.bank.Refused.")
]
Since = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Only dead letters that failed since: 30m, 2h, 7d ago, or a time."),
]
Until = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Only dead letters that failed before: 2h ago, or 2026-11-16T10:00."),
]
OfKind = Annotated[
    DeadLetterKind | None,
    typer.Option(help="Only this kind: the lane continued (dead), is blocked (archived), or was parked."),
]


def client(bootstrap: str | None, option: list[str] | None) -> KafkaSettings:
    """Return the client settings from the command line. Raises SettingsError."""
    if not bootstrap:
        raise SettingsError(
            "no broker address: pass --bootstrap host:9092 or set KEYLANE_BOOTSTRAP. "
            "'keylane broker start' starts one on this machine"
        )
    extra = []
    for pair in from_files(option or ()):
        setting, equals, value = pair.partition("=")
        if not equals or not setting.startswith("kafka."):
            raise SettingsError(
                f"--option: expected kafka.NAME=VALUE, such as kafka.security.protocol=SSL; got {pair!r}"
            )
        extra.append((setting.removeprefix("kafka."), value))
    return client_settings(bootstrap, dict(extra))


def from_files(pairs: Iterable[str]) -> Iterator[str]:
    """Replace each ``@FILE`` with the options in the file, one per line; blank lines and ``#`` lines are skipped.

    Secrets belong in such a file or in the environment: every user of the machine can see a command line. Options
    further right on the command line override those of a file. Raises SettingsError.
    """
    for pair in pairs:
        if not pair.startswith("@"):
            name, equals, _ = pair.partition("=")
            if equals and is_secret(
                name
            ):  # without "=" the name may have the secret in it, and an error follows
                typer.echo(
                    f"warning: {printable(name)} is on the command line, which every user of this machine can read: "
                    "use -o @FILE or KEYLANE_KAFKA_… instead",
                    err=True,
                )
            yield pair
            continue
        try:
            text = Path(pair[1:]).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise SettingsError(f"--option {pair}: could not read the file: {error}") from None
        for number, line in enumerate(map(str.strip, text.splitlines()), 1):
            if line and not line.startswith("#"):
                if "=" not in line:  # do not show the text: it may be a secret
                    raise SettingsError(f"--option {pair}: expected NAME=VALUE in line {number} of the file")
                name, _, value = line.partition("=")
                yield f"{name.strip()}={value.strip()}"


def select(
    now: float,
    *,
    key: bytes | None = None,
    stage: str | None,
    error: str | None,
    since: str | None,
    until: str | None,
    kind: DeadLetterKind | None,
) -> DeadLetterFilter:
    """Return the filter for dead letters. Raises SettingsError for invalid times."""
    selection = DeadLetterFilter(
        key=key,
        stage=stage,
        error=error,
        since=None if since is None else moment(since, now, "--since"),
        until=None if until is None else moment(until, now, "--until"),
        kind=kind,
    )
    if selection.since is not None and selection.until is not None and selection.since >= selection.until:
        raise SettingsError(f"--since must be before --until, got {since} and {until}")
    return selection


def moment(text: str, now: float, what: str) -> float:
    """Convert a time or an age to Unix seconds; a time without a zone is local. Raises SettingsError."""
    ago = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)([smhdw])", text)
    if ago:
        return now - float(ago[1]) * _UNITS[ago[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise SettingsError(
            f"{what}: expected an age (30m, 2h, 7d) or a time (2026-11-16T10:00 is local, …Z is UTC), got {text!r}"
        ) from None


def place(text: str) -> tuple[int, int]:
    """Parse ``3@17`` or ``topic/3@17`` into partition and offset; ``3/17`` works too. Raises SettingsError."""
    found = re.fullmatch(r"(?:(?:[A-Za-z0-9._-]{1,249}/)?([0-9]{1,9})@|([0-9]{1,9})/)([0-9]{1,18})", text)
    if found is None:
        raise SettingsError(
            f"expected a position PARTITION@OFFSET, such as 3@17 or chat.dlq/3@17, got {text!r}"
        )
    return int(found[1] or found[2]), int(found[3])
