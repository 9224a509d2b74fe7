"""``keylane race``: three orderings side by side, live, on real Kafka and Spark."""

from __future__ import annotations

import json as jsonlib
import logging
import os
import signal
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from keylane.errors import KeylaneError, SettingsError

if TYPE_CHECKING:
    from keylane.demo.race import Track
    from keylane.spark.query import LaneQuery

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_white", "bright_cyan")
_RACE_SECONDS_MAX = 120.0
_READY_SECONDS_MAX = 60.0


def race(
    messages: Annotated[int, typer.Option(help="Number of messages per app.")] = 400,
    keys: Annotated[int, typer.Option(help="Number of keys they belong to.")] = 8,
    work_ms: Annotated[float, typer.Option(help="Average time of the handler per message.")] = 20.0,
    web: Annotated[
        bool,
        typer.Option("--web", help="Show it in a browser, with a button for another round, until Ctrl-C."),
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="With --web: the port; 0 takes any free one.")
    ] = 8600,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
) -> None:
    """Compare orderings: the same messages through three apps, side by side.

    Without ordering, all messages run at once and finish in any order. In one global lane, they run one after another.
    With a lane per key, messages of a key keep their order, and keys run in parallel.

    Starts a real Kafka broker and Spark, and stops them. Takes about half a minute; the global lane takes work-ms per
    message.

    \b
    keylane race
    keylane race --web
    keylane race --keys 2
    keylane race --messages 1000 --work-ms 5 --json
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    if messages < 1 or not 1 <= keys <= messages or work_ms <= 0:
        raise SettingsError(
            "--messages must be at least 1, --keys between 1 and --messages, --work-ms greater than 0"
        )
    if messages * work_ms > 1000 * _RACE_SECONDS_MAX * 0.75:
        raise SettingsError(
            f"the global lane would take {messages * work_ms / 1000:.0f} s: lower --messages or --work-ms "
            f"(their product may be up to {_RACE_SECONDS_MAX * 0.75:.0f} s)"
        )
    if web and json:
        raise SettingsError("give --web or --json, not both")
    runner = _Race(
        Console(stderr=True), messages, keys, work_ms / 1000, live=not json, port=port if web else None
    )
    tracks = runner.run()
    sound = all(track.sound for track in tracks)
    if json:
        facts = {"messages": messages, "keys": keys, "work_ms": work_ms, "sound": sound}
        typer.echo(jsonlib.dumps({**facts, "lanes": [_facts(track) for track in tracks]}))
    elif tracks:
        Console().print(_view(tracks))
        Console().print(_moral(tracks))
    if not sound:
        raise KeylaneError("an ordering was not kept: see the figures above. Please report this")


class _Race:
    def __init__(
        self, console: Console, messages: int, keys: int, work: float, *, live: bool, port: int | None = None
    ) -> None:
        self._console, self._live, self._port = console, live, port
        self._messages, self._keys, self._work = messages, keys, work
        self._round = 0

    def run(self) -> list[Track]:
        from keylane.broker import Broker, shown  # noqa: PLC0415 - not needed for --help
        from keylane.demo.race import ORDERS, SOURCE, Track, make_app, sink  # noqa: PLC0415
        from keylane.kafka.cluster import Cluster  # noqa: PLC0415
        from keylane.kafka.settings import KafkaSettings  # noqa: PLC0415
        from keylane.spark import jvm  # noqa: PLC0415
        from keylane.spark.spark_session import session  # noqa: PLC0415

        logging.getLogger("keylane").setLevel(logging.ERROR)
        os.environ.setdefault("KEYLANE_LOG", "ERROR")  # for the tasks, which share this terminal
        tracks = [Track(order, self._messages) for order in ORDERS]
        with ExitStack() as stack:
            self._console.print("starting Kafka …")
            with shown() as progress:
                broker = stack.enter_context(Broker(progress=progress))
            cluster = Cluster(KafkaSettings(broker.bootstrap))
            for topic in (SOURCE, *map(sink, ORDERS)):
                cluster.ensure(topic, 1, {})
            self._console.print("starting Spark and three apps …")
            spark = session(f"local[{len(ORDERS)}]", "keylane race", lanes_only=True)
            stack.callback(jvm.end)  # with its workers, before the broker: their clients would log errors
            stack.callback(spark.stop)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keylane-race-")))
            queries: list[LaneQuery] = []
            stack.callback(_stop, queries)
            for order in ORDERS:
                query = make_app(order, self._work).start(
                    spark,
                    bootstrap=broker.bootstrap,
                    tasks=1,
                    epoch=600,
                    checkpoint_location=str(folder / order),
                    query_name=f"race-{order}",
                )
                queries.append(query)
            reader = _Reader(broker.bootstrap, tracks)
            stack.callback(reader.close)
            self._warm_up(broker.bootstrap, reader, queries)
            if self._port is None:
                self._watch(broker.bootstrap, tracks, queries)
            else:
                tracks = self._serve(self._port, broker.bootstrap, reader, queries)
        return tracks

    def _serve(self, port: int, bootstrap: str, reader: _Reader, queries: list[LaneQuery]) -> list[Track]:
        """Run a round whenever a browser wants one, until Ctrl-C. Return the last round."""
        from keylane.cli.console import make_server  # noqa: PLC0415
        from keylane.demo.race import ORDERS, Track  # noqa: PLC0415
        from keylane.demo.race_feed import RaceFeed  # noqa: PLC0415
        from keylane.kafka.settings import KafkaSettings  # noqa: PLC0415

        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # Spark's would cancel the apps without a drain
        feed = RaceFeed(self._messages, self._keys, self._work * 1000)
        apps = [f"race-{order}" for order in ORDERS]
        tracks: list[Track] = []
        with make_server(
            KafkaSettings(bootstrap), apps, say=self._console.print, port=port, race=feed
        ) as server:
            self._console.print(f"the race: {server.link}\nCtrl-C ends it", soft_wrap=True)
            try:
                while True:
                    if not feed.wait(0.5):
                        _check(queries)
                        continue
                    tracks = [Track(order, self._messages) for order in ORDERS]
                    reader.follow(tracks)
                    feed.begin(tracks)
                    self._round += 1
                    self._watch(bootstrap, tracks, queries)
            except KeyboardInterrupt:
                return tracks

    def _warm_up(self, bootstrap: str, reader: _Reader, queries: list[LaneQuery]) -> None:
        """Wait for a result from every app: Spark's start is not part of the race."""
        _send(bootstrap, [(b"k0", -1)], 0)
        deadline = time.monotonic() + _READY_SECONDS_MAX
        while not reader.ready:
            _check(queries)
            if time.monotonic() > deadline:
                raise KeylaneError(
                    f"some apps had no result after {_READY_SECONDS_MAX:.0f} s: is the machine very busy?"
                )
            time.sleep(0.05)

    def _watch(self, bootstrap: str, tracks: list[Track], queries: list[LaneQuery]) -> None:
        load = [(b"k%d" % (number % self._keys), number) for number in range(self._messages)]
        _send(bootstrap, load, self._round)
        deadline = time.monotonic() + _RACE_SECONDS_MAX
        quiet = not (self._live and self._console.is_terminal)
        told: set[str] = set()
        with Live(console=self._console, refresh_per_second=12, transient=True, auto_refresh=False) as live:
            while any(track.done < track.messages for track in tracks):
                _check(queries)
                if time.monotonic() > deadline:
                    return  # the figures show what is missing
                if not quiet:
                    live.update(_view(tracks), refresh=True)
                for track in tracks:
                    if track.done == track.messages and track.order not in told:
                        told.add(track.order)
                        if quiet and self._live:
                            self._console.print(f"{track.order}: done after {track.seconds:.1f} s")
                time.sleep(0.08)


class _Reader:
    """Reader of the three sinks, in its own thread, until closed."""

    def __init__(self, bootstrap: str, tracks: list[Track]) -> None:
        from keylane.kafka.client import Consumer, TopicPartition  # noqa: PLC0415

        self.follow(tracks)
        self._warm: set[str] = set()
        self._ended = threading.Event()
        self._consumer: Any = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "race",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 10,
                "log_level": 0,
            }
        )
        self._consumer.assign([TopicPartition(topic, 0, 0) for topic in self._tracks])
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def follow(self, tracks: list[Track]) -> None:
        """Give the results to these tracks from now on."""
        from keylane.demo.race import sink  # noqa: PLC0415

        self._tracks = {sink(track.order): track for track in tracks}

    @property
    def ready(self) -> bool:
        """Return whether every app has produced a result."""
        return len(self._warm) == len(self._tracks)

    def close(self) -> None:
        """Stop reading."""
        self._ended.set()
        self._thread.join(5)
        self._consumer.close()

    def _read(self) -> None:
        while not self._ended.is_set():
            message = self._consumer.poll(0.1)
            if message is None or message.error() is not None:
                continue
            if message.topic() not in self._warm:
                self._warm.add(message.topic())
            else:
                self._tracks[message.topic()].see(message.key(), message.value())


def _send(bootstrap: str, load: list[tuple[bytes, int]], round_: int) -> None:
    from keylane.demo.race import SOURCE  # noqa: PLC0415
    from keylane.publisher import Publisher  # noqa: PLC0415

    with Publisher(SOURCE, bootstrap=bootstrap) as publisher:
        for key, number in load:
            publisher.send(str(number), key=key, event_id=f"race-{round_}-{number}")


def _stop(queries: list[LaneQuery]) -> None:
    """Stop all in parallel: each drain takes a second or two."""
    stopping = [threading.Thread(target=query.stop) for query in queries]
    for thread in stopping:
        thread.start()
    for thread in stopping:
        thread.join()


def _check(queries: list[LaneQuery]) -> None:
    from keylane.spark.failure_report import cause  # noqa: PLC0415

    for query in queries:
        if not query.isActive:
            raise KeylaneError(f"an app ended too early: {cause(query.exception()).line}")


def _view(tracks: list[Track]) -> Group:
    from keylane.demo.race import TITLES  # noqa: PLC0415

    parts: list[Any] = []
    for track in tracks:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(width=42)
        grid.add_column(width=13, justify="right")
        grid.add_column(width=12, justify="right")
        grid.add_column(width=16, justify="right")
        grid.add_row(
            ProgressBar(total=track.messages, completed=track.done, width=42),
            f"{track.done:,}/{track.messages:,}",
            f"{track.per_second:,.0f}/s",
            f"{track.at_once:,} at once",
        )
        parts += [Text(TITLES[track.order], style="bold"), grid, _trace(track), Text("")]
    return Group(*parts)


def _trace(track: Track) -> Text:
    """Show the latest finished messages, coloured by key; those overtaken in their key are marked."""
    line = Text("finished: ", style="dim")
    for finish in list(track.recent):
        style = _COLOURS[finish.key % len(_COLOURS)] + (" reverse" if finish.late else "")
        line.append(str(finish.number), style=style)
        line.append(" ")
    if track.done:
        line.append(f" overtaken: {track.overtaken:,}, in their key: {track.overtaken_in_key:,}", style="dim")
    return line


def _moral(tracks: list[Track]) -> Table:
    table = Table(title="the same messages, three orderings")
    for column in (
        "order",
        "seconds",
        "messages/s",
        "at once",
        "overtaken",
        "overtaken inside their key",
        "kept",
    ):
        table.add_column(column, justify="left" if column == "order" else "right")
    for track in tracks:
        kept = "—" if track.order == "none" else "yes" if track.sound else "NO"
        table.add_row(
            track.order,
            f"{track.seconds:.2f}",
            f"{track.per_second:,.0f}",
            f"{track.at_once:,}",
            f"{track.overtaken:,}",
            f"{track.overtaken_in_key:,}",
            kept,
        )
    return table


def _facts(track: Track) -> dict[str, Any]:
    return {
        "order": track.order,
        "done": track.done,
        "seconds": round(track.seconds, 3),
        "per_second": round(track.per_second, 1),
        "at_once": track.at_once,
        "overtaken": track.overtaken,
        "overtaken_in_key": track.overtaken_in_key,
        "duplicates": track.doubles,
        "sound": track.sound,
        "trace": [{"n": one.number, "key": one.key, "late": one.late} for one in track.trace],
    }
