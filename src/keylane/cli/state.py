"""`keylane state get|list`: what an app's stages remember for its lanes, and the timers that they have set."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keylane.cli.arguments import App, Bootstrap, Json, Options, client
from keylane.engine.lane_state import TIMER, VALUE
from keylane.errors import KeylaneError
from keylane.key_text import parse_key, printable, show_key
from keylane.state.admin import AdminClient
from keylane.state.lane_values import read_values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from keylane.engine.lane_state import Name, StoredValue

app = typer.Typer(
    name="state",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Lane state: show what an app remembers for a key, and the key's timers.",
)

Key = Annotated[
    str, typer.Argument(metavar="KEY", help="The key: text, or hex:… for bytes that are not text.")
]
_SHOWN_CHARACTERS = 100


@app.command()
def get(
    name: App, key: Key, bootstrap: Bootstrap = None, option: Options = None, as_json: Json = False
) -> None:
    """Show the committed states of a key, as JSON, and its timers.

    \b
    keylane state get chat anna
    keylane state get chat anna --json | jq .states
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    lane = parse_key(key)
    found = _read(name, bootstrap, option, lambda _tag, one: one == lane)
    if as_json:
        typer.echo(json.dumps({"app": name, "key": show_key(lane), **_facts(found)}))
        return
    if not found:
        raise KeylaneError(f"app {name!r} remembers nothing for key {show_key(lane)}, and it has no timers")
    facts = _facts(found)
    for state, value in facts["states"].items():
        typer.echo(f"{state}  {printable(json.dumps(value, ensure_ascii=False))}")
    for timer in facts["timers"]:
        typer.echo(
            f"timer {timer['name']}  due {_time(timer['at'])}  {printable(json.dumps(timer['value']))}"
        )


@app.command("list")
def list_(
    name: App,
    bootstrap: Bootstrap = None,
    option: Options = None,
    state: Annotated[str | None, typer.Option("--state", help="Only this state.")] = None,
    timers: Annotated[bool, typer.Option("--timers", help="Timers, by time, instead of states.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Lines to print.")] = 100,
    as_json: Json = False,
) -> None:
    """List committed states by key, or timers by time. Reads the whole topic.

    \b
    keylane state list chat
    keylane state list chat --timers --limit 20
    """  # noqa: D301 - as above
    prefix = TIMER if timers else VALUE + (state or "")
    exact = not timers and state is not None
    found = _read(name, bootstrap, option, lambda tag, _: tag == prefix if exact else tag.startswith(prefix))
    rows = sorted(found.items(), key=lambda item: (item[1].due if timers else 0, item[0]))
    if as_json:
        for (partition, lane, tag), value in rows[:limit]:
            what = {"timer" if timers else "state": tag[2:], "due": value.due / 1000 if value.due else None}
            line = {
                "key": show_key(lane),
                "partition": partition,
                **what,
                "value": json.loads(value.content or b"null"),
            }
            typer.echo(json.dumps(line))
        return
    for (_, lane, tag), value in rows[:limit]:
        text = printable((value.content or b"").decode("utf-8", "replace"))
        short = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
        due = f"  {'due' if timers else 'until'} {_time(value.due / 1000)}" if value.due else ""
        typer.echo(f"{show_key(lane)}  {tag[2:]}{due}  {short}")
    if len(rows) > limit:
        typer.echo(f"… and {len(rows) - limit:,} more (--limit)")
    if not rows:
        typer.echo("nothing")


def _read(
    name: str, bootstrap: str | None, option: Any, wanted: Callable[[str, bytes], bool]
) -> Mapping[Name, StoredValue]:
    settings = client(bootstrap, option)
    with AdminClient(settings, name) as operator:
        source = operator.home.source
    return read_values(settings, name, source, wanted)


def _facts(found: Mapping[Name, StoredValue]) -> dict[str, Any]:
    states = {
        tag[2:]: json.loads(value.content or b"null")
        for (*_, tag), value in found.items()
        if tag.startswith(VALUE)
    }
    timers = [
        {"name": tag[2:], "at": value.due / 1000, "value": json.loads(value.content or b"null")}
        for (*_, tag), value in found.items()
        if tag.startswith(TIMER)
    ]
    return {"states": dict(sorted(states.items())), "timers": sorted(timers, key=lambda timer: timer["at"])}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
