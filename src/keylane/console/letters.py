"""Dead letters for the page: the index of each app, one letter in full, and the choice for a redrive."""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillReadingError
from typing import TYPE_CHECKING, Any

from keylane.console.letter_index import LetterIndex, LetterQuery
from keylane.dlq.facts import letter_facts
from keylane.dlq.reader import read_dead_letters
from keylane.dlq.record import DeadLetter, DeadLetterKind, UnreadableDeadLetter
from keylane.errors import BrokerError, SettingsError
from keylane.key_text import key_argument, parse_key, show_key
from keylane.offsets.offset_runs import OffsetRuns
from keylane.safe_text import cut
from keylane.state.redrive_choice import RedriveWay
from keylane.topic_names import dead_letter_topic
from keylane.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from keylane.console.hub import Hub
    from keylane.dlq.record import ExpectedOrigin
    from keylane.dlq.summary import Cause
    from keylane.state.admin import AdminClient

FRESH_SECONDS = 2.0
"""Age at which an index is refreshed when it is asked."""
_WAIT_SECONDS = 1.0
"""Time that a question waits for a refresh; then it gets what was read so far."""
TEXT_CHARACTERS_MAX = 100_000
HEX_BYTES_MAX = 4096
_ASK_SECONDS = 15.0


class LetterDesk:
    """Indexes of the apps' dead letters, made when somebody asks. Thread-safe."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._lock = threading.Lock()
        self._indexes: dict[str, LetterIndex] = {}
        self._refreshed: dict[str, float] = {}
        self._running: dict[str, Future[None]] = {}
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="keylane-console-letters")

    def close(self) -> None:
        """Close all indexes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for index in self._indexes.values():
            index.close()

    def index(self, app: str) -> LetterIndex:
        """The app's index, fresh or being refreshed. Raises BrokerError if its letters cannot be read."""
        self._hub.watch(app)  # only apps that are watched
        with self._lock:
            index = self._indexes.setdefault(app, LetterIndex(self._hub.settings, app))
            running = self._running.get(app)
            if running is None or (
                running.done()
                and time.monotonic() - self._refreshed.get(app, -FRESH_SECONDS) >= FRESH_SECONDS
            ):
                running = self._running[app] = self._pool.submit(self._refresh, app, index)
        with contextlib.suppress(StillReadingError):  # the page shows how far it is, and asks again
            running.result(_WAIT_SECONDS)
        return index

    def _refresh(self, app: str, index: LetterIndex) -> None:
        home, redriven = self._known(app)
        index.refresh(home, redriven)
        self._refreshed[app] = time.monotonic()

    def _known(self, app: str) -> tuple[ExpectedOrigin, dict[int, OffsetRuns]]:
        def ask(operator: AdminClient) -> tuple[ExpectedOrigin, dict[int, OffsetRuns]]:
            copies = {partition: OffsetRuns().union(runs) for partition, runs in operator.redriven().items()}
            return operator.home, copies

        return self._hub.watch(app).ask(ask).result(_ASK_SECONDS)

    def letter(self, app: str, partition: int, offset: int, *, contents: bool) -> dict[str, Any]:
        """One dead letter. Its value and the values of its headers only if ``contents`` are asked for."""
        home, redriven = self._known(app)
        found = self._read(app, partition, offset)
        done = found.offset in redriven.get(found.partition, ())
        facts = letter_facts(found, [], redriven=done)
        checked = home.check(found)
        foreign = isinstance(checked, UnreadableDeadLetter) and isinstance(found, DeadLetter)
        value = found.value
        facts["key"] = None if facts["key"] is None else cut(facts["key"], 2000)
        facts["size"] = None if value is None else len(value)
        facts["foreign"] = checked.reason if foreign and isinstance(checked, UnreadableDeadLetter) else None
        for name in ("message", "traceback", "reason"):
            if facts.get(name) is not None:
                facts[name] = cut(facts[name], TEXT_CHARACTERS_MAX)
        for header in facts["headers"]:
            header["name"] = cut(header["name"], 200)
            if not contents:
                header["value"] = None
            elif header["value"] is not None:
                header["value"] = cut(header["value"], 4000)
        text = facts.pop("value")
        del facts["value_hex"]
        facts["contents"] = None
        if contents and value is not None:
            facts["contents"] = {
                "text": None if text is None else text[:TEXT_CHARACTERS_MAX],
                "hex": value[:HEX_BYTES_MAX].hex(),
                "cut": (text is not None and len(text) > TEXT_CHARACTERS_MAX),
                "hex_cut": len(value) > HEX_BYTES_MAX,
            }
        facts["cli"] = f"keylane dlq show {app} {found.position} --bootstrap {self._hub.settings.bootstrap}"
        return facts

    def raw(self, app: str, partition: int, offset: int) -> bytes:
        """The value of one dead letter, byte for byte."""
        value = self._read(app, partition, offset).value
        if value is None:
            raise SettingsError("this dead letter has no value: it is a tombstone")
        return value

    def _read(self, app: str, partition: int, offset: int) -> DeadLetter | UnreadableDeadLetter:
        self._hub.watch(app)
        for letter in read_dead_letters(
            self._hub.settings,
            dead_letter_topic(app),
            partitions=[partition],
            start={partition: offset},
            end={partition: offset + 1},
        ):
            return letter
        raise BrokerError(
            f"no dead letter at {app}.dlq/{partition}@{offset}: the partition ends before it, or retention deleted it"
        )

    def way(self, app: str, wanted: Mapping[str, Any]) -> tuple[RedriveWay, str, str]:
        """How a redrive chooses, in words, and as a command line. Raises SettingsError for an invalid choice."""
        at = f" --bootstrap {self._hub.settings.bootstrap}"
        base = f"keylane dlq redrive {app}"
        if "positions" in wanted:
            places = frozenset(_place(one) for one in wanted["positions"][:1000])
            if not places:
                raise SettingsError("expected at least one position")
            names = [f"{partition}@{offset}" for partition, offset in sorted(places)]
            return (
                RedriveWay(takes=lambda one, _c, _a: (one.partition, one.offset) in places, places=places),
                counted(len(places), "dead letter") + f": {', '.join(names[:5])}",
                f"{base} {' '.join(names)}{at}",
            )
        if wanted.get("lane") is not None:
            key = parse_key(str(wanted["lane"]))
            return (
                RedriveWay(takes=lambda one, _c, _a: one.key == key, whole=True, key=key),
                f"all dead letters of lane {show_key(key)}",
                f"{base} --lane {key_argument(key)}{at}",
            )
        query = query_of(wanted)
        cause = None if query.cause is None else self.index(app).cause(query.cause)
        if query.cause is not None and cause is None:
            raise SettingsError("this cause is not known any more: load the page again")

        def takes(letter: DeadLetter, its: Cause, at: float | None) -> bool:
            return (
                (cause is None or its == cause)
                and (query.key is None or letter.key == query.key)
                and (query.kind is None or letter.kind is query.kind)
                and (query.stage is None or its.stage == query.stage)
                and (query.error is None or f".{its.error}".endswith(f".{query.error}"))
                and (query.since is None or (at is not None and at >= query.since))
                and (query.until is None or (at is not None and at < query.until))
            )

        return (RedriveWay(takes=takes), _words(query, cause), base + _options(query, cause) + at)


def query_of(given: Mapping[str, Any]) -> LetterQuery:
    """The filter that a request asks for. Raises SettingsError for an invalid one."""

    def number(name: str) -> float | None:
        found = given.get(name)
        if found in (None, ""):
            return None
        try:
            value = float(str(found))
        except ValueError:
            raise SettingsError(f"{name}: expected a Unix time, got {str(found)[:50]!r}") from None
        if not 0 <= value < 1e11:
            raise SettingsError(f"{name}: expected a Unix time, got {str(found)[:50]!r}")
        return value

    kind, cause = given.get("kind"), given.get("cause")
    if kind not in (None, "", *(one.value for one in DeadLetterKind)):
        raise SettingsError(f"kind: expected dead, archived or parked, got {str(kind)[:50]!r}")
    if cause not in (None, "") and not str(cause).isdecimal():
        raise SettingsError(f"cause: expected its number, got {str(cause)[:50]!r}")
    key = given.get("key")
    return LetterQuery(
        key=parse_key(str(key)) if key not in (None, "") else None,
        stage=str(given["stage"]) if given.get("stage") else None,
        error=str(given["error"]) if given.get("error") else None,
        since=number("since"),
        until=number("until"),
        kind=DeadLetterKind(kind) if kind else None,
        cause=int(str(cause)[:9]) if cause not in (None, "") else None,
        redriven=str(given.get("redriven", "")) in ("1", "true", "True"),
    )


def _place(text: object) -> tuple[int, int]:
    partition, at, offset = str(text).partition("@")
    if not at or not partition.isdecimal() or not offset.isdecimal() or len(str(text)) > 40:
        raise SettingsError(f"expected a position PARTITION@OFFSET, got {str(text)[:50]!r}")
    return int(partition), int(offset)


def _words(query: LetterQuery, cause: Cause | None) -> str:
    parts = []
    if cause is not None:
        parts.append(f"cause {cut(f'{cause.stage}: {cause.error}: {cause.message}', 200)}")
    if query.key is not None:
        parts.append(f"key {cut(show_key(query.key), 100)}")
    chosen = {"stage": query.stage, "error": query.error}
    parts += [f"{name} {cut(text, 100)}" for name, text in chosen.items() if text is not None]
    if query.kind is not None:
        parts.append(f"kind {query.kind}")
    if query.since is not None or query.until is not None:
        parts.append("of a span of time")
    return f"dead letters with {', '.join(parts)}" if parts else "all dead letters"


def _options(query: LetterQuery, cause: Cause | None) -> str:
    """The filter as options. The command line has none for a cause's message, so it takes all of that error."""
    stage = query.stage or (cause and cause.stage)
    error = query.error or (cause and cause.error)
    pairs = [
        ("stage", stage),
        ("error", error),
        ("since", None if query.since is None else _local(query.since)),
        ("until", None if query.until is None else _local(query.until)),
        ("kind", None if query.kind is None else query.kind.value),
    ]
    options = "".join(f" --{name} {shlex.quote(value)}" for name, value in pairs if value)
    return options or " --all"


def _local(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
