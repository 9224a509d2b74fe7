"""Read models: a table with a row per key, in which every event type writes fields of its own.

Whoever writes one ``status`` from many events needs them in order. Here ``OrderPaid`` writes ``paid_at`` and nobody
else does; the status is derived when it is read. Of two events of one type the one of the higher *rank* counts: its
version, else its time, then its event id. A rank says nothing of when the event arrived, so the table is the same
whatever came first, twice or again.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from blake3 import blake3

from keylane.errors import Poison, SettingsError
from keylane.handlers.fields import Field
from keylane.policies.versions import parse_version
from keylane.readmodel.fields import ReadModelField, from_milliseconds, parse_time, sortable

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from keylane.message import Message
    from keylane.readmodel.spark_table import SparkTable
    from keylane.readmodel.sqlite import SqliteTable

    Reader = Callable[[Message], Any]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")
_STATUS = "status"
_NONE = "-"
"""Sorts before every digit: an event without a version, or without a time, comes before those that have one."""


class Facts(NamedTuple):
    """What one event says: the fields of its type, whole, and its place among the events of that type."""

    key: str
    type: str
    rank: str
    values: tuple[Any, ...]


class ReadModel:
    """A table with a row per key, made of events that may come in any order and any number of times.

    >>> orders = ReadModel(
    ...     "orders",
    ...     key="order_id",
    ...     fields={
    ...         "OrderPlaced": {"placed_at": datetime, "total": int, "city": Fact(str, "address.city")},
    ...         "OrderPaid": {"paid_at": datetime},
    ...     },
    ...     status={"placed": "placed_at", "paid": "paid_at"},
    ... )

    ``fields`` are those that each event type writes, as ``int``, ``float``, ``str``, ``bool``, ``datetime`` or a
    :class:`ReadModelField`. A type alone means: under this name in the event's value (JSON, or what the app decodes),
    and for ``datetime`` the time of the event. A field belongs to one event type. The fields of a type are written
    together: of two ``OrderPlaced`` of a key the one of the higher rank counts, whole.

    ``status`` is derived when it is read: from times, ``{"paid": "paid_at"}``, the latest of them counts, of equal ones
    the one named last; or an SQL expression over the fields. ``key`` is what the key's column is called.

    ``event_type`` and ``version`` are names of headers or functions of the message such as :class:`Field`, ``time`` is
    one for the time of the event (text with its zone, or a datetime); without it the message's timestamp is taken.

    Raises :class:`SettingsError` for what cannot work.
    """

    def __init__(
        self,
        name: str,
        *,
        fields: Mapping[str, Mapping[str, type | ReadModelField]],
        status: Mapping[str, str] | str | None = None,
        key: str = "key",
        event_type: str | Reader = "event-type",
        version: str | Reader = "event-version",
        time: Reader | None = None,
    ) -> None:
        self.name = name
        where = f"ReadModel({name!r})"
        _check_name(where, "name", name)
        self.key = key
        _check_name(where, "key", key)
        self.fields = _fields(where, fields, key)
        self.status = _status(where, status, self.fields)
        readers: dict[str, object] = {"event_type": event_type, "version": version}
        for what, given in readers.items():
            if not callable(given) and (not isinstance(given, str) or not given):
                raise SettingsError(
                    f"{where}: {what}={given!r} is no header's name and no function of a message"
                )
        if time is not None and not callable(time):
            raise SettingsError(f"{where}: time={time!r} is no function of a message; write time=Field('at')")
        self.event_type = event_type
        self.version = version
        self.time = time
        self._found = {
            kind: [(fact, Field(fact.path or name)) for name, fact in facts.items()]
            for kind, facts in self.fields.items()
        }
        self._bare = {  # event types whose facts do not need the value
            kind
            for kind, facts in self.fields.items()
            if all(fact.is_time_of_event for fact in facts.values())
            and not any(isinstance(reader, Field) for reader in (version, time))
        }

    @property
    def columns(self) -> dict[str, ReadModelField]:
        """All fields, in the order they were declared."""
        return {name: fact for facts in self.fields.values() for name, fact in facts.items()}

    def rank_column(self, event_type: str) -> str:
        """Where a table keeps the rank of the event that wrote the fields of this type."""
        return f"_{event_type}"

    @property
    def form(self) -> str:
        """What has to be the same for two tables to be of the same model."""
        facts = {
            kind: {name: [fact.kind.__name__, fact.path] for name, fact in facts.items()}
            for kind, facts in self.fields.items()
        }
        readers = [_shown(reader) for reader in (self.event_type, self.version, self.time)]
        return json.dumps([self.key, facts, readers], sort_keys=True)

    def facts(self, msg: Message) -> Facts | None:
        """What this event says; None when its type is none of the model's.

        Raises :class:`Poison`, which names the field, when the event does not fit.
        """
        kind = self._type(msg)
        facts = self._found.get(kind or "")
        if kind is None or facts is None:
            return None
        if msg.key is None:
            raise Poison(f"{kind} without a key: a read model has a row per key")
        try:
            key = msg.key.decode()
        except UnicodeDecodeError:
            raise Poison(f"{kind}: the key {msg.key!r:.60} is no UTF-8") from None
        value = None if kind in self._bare else _decoded(kind, msg.value)
        try:
            time = self._time(msg, value)
            version = self._version(msg, value)
            values = tuple(
                _needed(field.path, time)
                if fact.is_time_of_event
                else fact.take(field.path, field.inside(value))
                for fact, field in facts
            )
        except Poison as error:
            raise Poison(f"{kind}: {error}") from None
        return Facts(key, kind, _rank(version, time, msg.event_id, values), values)

    def status_sql(self, quote: str = '"') -> str | None:
        """The status as an SQL expression over the fields."""
        if self.status is None or isinstance(self.status, str):
            return self.status
        names = {state: f"{quote}{field}{quote}" for state, field in self.status.items()}
        cases = []
        for state, mine in reversed(names.items()):
            others = [f"({other} IS NULL OR {mine} >= {other})" for other in names.values() if other != mine]
            said = state.replace("'", "''")
            cases.append(f"WHEN {' AND '.join([f'{mine} IS NOT NULL', *others])} THEN '{said}'")
        return f"CASE {' '.join(cases)} END"

    def sqlite(self, path: str | Path, *, timeout: float = 30.0) -> SqliteTable:
        """The model in a SQLite file, for handlers: see :class:`keylane.readmodel.sqlite.SqliteTable`."""
        from keylane.readmodel.sqlite import SqliteTable  # noqa: PLC0415 - for who asks for it

        return SqliteTable(self, path, timeout=timeout)

    def table(self, spark: SparkSession, path: str | Path, *, retain: float = 600.0) -> SparkTable:
        """The model as a Parquet table in this folder: see :class:`keylane.readmodel.spark_table.SparkTable`."""
        from keylane.readmodel.spark_table import SparkTable  # noqa: PLC0415 - Spark is needed only from here on

        return SparkTable(self, spark, path, retain=retain)

    def _type(self, msg: Message) -> str | None:
        found = self.event_type(msg) if callable(self.event_type) else msg.header(self.event_type)
        return found if isinstance(found, str) else None

    def _version(self, msg: Message, value: Any) -> int | None:
        reader = self.version
        if isinstance(reader, str):
            found: Any = msg.header(reader)
        else:
            found = reader.inside(value) if isinstance(reader, Field) else reader(msg)
        if found is None:
            return None
        try:
            return parse_version(found)
        except ValueError as error:
            raise Poison(str(error)) from None

    def _time(self, msg: Message, value: Any) -> datetime | None:
        reader = self.time
        if reader is None:
            found = msg.timestamp
            return None if found is None else from_milliseconds(found)
        told = reader.inside(value) if isinstance(reader, Field) else reader(msg)
        return None if told is None else parse_time("the event's time", told)

    def __repr__(self) -> str:
        return f"ReadModel({self.name!r}, fields={[*self.columns]})"


def _rank(version: int | None, time: datetime | None, event_id: str, values: tuple[Any, ...]) -> str:
    """Text that sorts by version, then time, then event id; two ranks are equal only when everything is.

    The values are in it too: of two events that share an id, a version and a time and still differ, all tables have
    to keep the same one.
    """
    said = _NONE if version is None else f"{version:019d}"
    when = _NONE if time is None else sortable(time)
    return f"{said} {when} {event_id} {blake3(repr(values).encode()).hexdigest(length=8)}"


def _needed(name: str, time: datetime | None) -> datetime:
    if time is None:
        raise Poison(f"{name}: the event has no time")
    return time


def _decoded(kind: str, value: Any) -> Any:
    if not isinstance(value, bytes | str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Poison(f"{kind}: the value is no JSON: {error}") from None


def _shown(reader: object) -> str:
    if isinstance(reader, Field):
        return f"field {reader.path}"
    return str(getattr(reader, "__qualname__", reader))


def _check_name(where: str, what: str, name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SettingsError(
            f"{where}: {what}={name!r} cannot name a table or column; use up to 63 letters, digits and _, beginning "
            "with a letter"
        )


def _fields(where: str, given: object, key: str) -> dict[str, dict[str, ReadModelField]]:
    like = "fields={'OrderPaid': {'paid_at': datetime}}"
    if not isinstance(given, Mapping) or not given:
        raise SettingsError(f"{where}: fields={given!r}; name what each event type writes: {like}")
    owners = {key.lower(): "the key", _STATUS: "the status"}
    types: dict[str, str] = {}
    found: dict[str, dict[str, ReadModelField]] = {}
    for kind, facts in given.items():
        if not isinstance(kind, str) or not kind:
            raise SettingsError(f"{where}: {kind!r} is no event type; write {like}")
        if kind.lower() in types:
            raise SettingsError(
                f"{where}: the event types {types[kind.lower()]!r} and {kind!r} differ in upper and lower case only, "
                "which columns do not"
            )
        types[kind.lower()] = kind
        if not isinstance(facts, Mapping) or not facts:
            raise SettingsError(f"{where}: {kind!r} writes no field: {facts!r}; write {like}")
        found[kind] = {}
        for name, fact in facts.items():
            _check_name(f"{where}, {kind!r}", "field", name)
            if name.lower() in owners:
                raise SettingsError(
                    f"{where}: the field {name!r} of {kind!r} belongs to {owners[name.lower()]} already; fields that "
                    "two event types write would need their events in order: give each its own"
                )
            owners[name.lower()] = repr(kind)
            if not isinstance(fact, ReadModelField):
                try:
                    fact = ReadModelField(fact)  # noqa: PLW2901
                except SettingsError:
                    raise SettingsError(
                        f"{where}: the field {name!r} of {kind!r} is {fact!r}; it is int, float, str, bool, datetime, "
                        "or Fact(int, 'where.it.is')"
                    ) from None
            found[kind][name] = fact
    return found


def _status(
    where: str, given: object, fields: Mapping[str, Mapping[str, ReadModelField]]
) -> dict[str, str] | str | None:
    if given is None or (isinstance(given, str) and given.strip()):
        return given
    if not isinstance(given, Mapping) or not given:
        raise SettingsError(
            f"{where}: status={given!r}; write status={{'paid': 'paid_at'}}, or an SQL expression over the fields"
        )
    kinds = {name: fact.kind for facts in fields.values() for name, fact in facts.items()}
    for state, field in given.items():
        if not isinstance(state, str) or not state:
            raise SettingsError(f"{where}: status: {state!r} is no text")
        if kinds.get(field) is not datetime:
            times = [name for name, kind in kinds.items() if kind is datetime]
            near = difflib.get_close_matches(str(field), times, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(times) or 'none'}"
            raise SettingsError(
                f"{where}: status: {state!r} goes by {field!r}, which is none of the times; {hint}"
            )
    if len(set(given.values())) < len(given):
        raise SettingsError(f"{where}: status: two states go by the same time")
    return dict(given)
