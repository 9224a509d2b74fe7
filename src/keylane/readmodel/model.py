"""Read models: tables with a row per key, in which every event type writes fields of its own.

The table is the same whatever the order and the repetition of its events. To update one ``status`` from several event
types, the events would have to be in order; here only ``OrderPaid`` writes ``paid_at``, and the status is derived when
it is read. Of two events of one type the one with the higher *rank* counts: by version, then time, then event id. The
rank does not depend on when the event arrived.
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

_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")
_STATUS = "status"
_MISSING = "-"
"""Represents a missing version or time in a rank. It sorts before every digit."""


class Facts(NamedTuple):
    """The fields that one event writes, and its rank among the events of its type."""

    key: str
    type: str
    rank: str
    values: tuple[Any, ...]


class ReadModel:
    """A table with a row per key, built from events that may come in any order and any number of times.

    >>> orders = ReadModel(
    ...     "orders",
    ...     key="order_id",
    ...     fields={
    ...         "OrderPlaced": {"placed_at": datetime, "total": int, "city": ReadModelField(str, "address.city")},
    ...         "OrderPaid": {"paid_at": datetime},
    ...     },
    ...     status={"placed": "placed_at", "paid": "paid_at"},
    ... )

    * ``fields``: what each event type writes, as ``int``, ``float``, ``str``, ``bool``, ``datetime`` or a
      :class:`ReadModelField`. A plain type is read from the event's value (JSON, or what the app decodes) under the
      field's name; a plain ``datetime`` is the time of the event. A field belongs to one event type. The fields of a
      type are written together: of two ``OrderPlaced`` of a key, all come from the one with the higher rank.
    * ``status``: derived when it is read. With ``{"paid": "paid_at"}`` the state with the latest time counts, and
      among equal times the one declared last. It may also be an SQL expression over the fields.
    * ``key``: the name of the key's column.
    * ``event_type`` and ``version``: names of headers, or functions of the message such as :class:`Field`.
    * ``time``: a function of the message for the event's time (text with a zone, or a datetime); without it, the
      message's timestamp.

    Raises :class:`SettingsError` for settings that cannot work.
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
                    f"{where}: {what} must be the name of a header or a function of a message, got {given!r}"
                )
        if time is not None and not callable(time):
            raise SettingsError(
                f"{where}: time must be a function of a message, got {time!r}; write time=Field('at')"
            )
        self.event_type = event_type
        self.version = version
        self.time = time
        self._found = {
            kind: [(fact, Field(fact.path or name)) for name, fact in facts.items()]
            for kind, facts in self.fields.items()
        }
        self._without_value = {  # event types whose fields are not in the value
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
        """The column with the rank of the event that wrote the fields of this type."""
        return f"_{event_type}"

    @property
    def form(self) -> str:
        """A text that is equal for two models whose tables are interchangeable."""
        facts = {
            kind: {name: [fact.kind.__name__, fact.path] for name, fact in facts.items()}
            for kind, facts in self.fields.items()
        }
        readers = [_shown(reader) for reader in (self.event_type, self.version, self.time)]
        return json.dumps([self.key, facts, readers], sort_keys=True)

    def facts(self, msg: Message) -> Facts | None:
        """The fields that this event writes; None when its type is not in the model.

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
            raise Poison(f"{kind}: the key {msg.key!r:.60} is not UTF-8") from None
        value = None if kind in self._without_value else _decoded(kind, msg.value)
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
        for state, own in reversed(names.items()):
            others = [f"({other} IS NULL OR {own} >= {other})" for other in names.values() if other != own]
            text = state.replace("'", "''")
            cases.append(f"WHEN {' AND '.join([f'{own} IS NOT NULL', *others])} THEN '{text}'")
        return f"CASE {' '.join(cases)} END"

    def sqlite(self, path: str | Path, *, timeout: float = 30.0) -> SqliteTable:
        """The model in a SQLite file, for use in handlers: see :class:`keylane.readmodel.sqlite.SqliteTable`."""
        from keylane.readmodel.sqlite import SqliteTable  # noqa: PLC0415 - needed only from here on

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
        given = reader.inside(value) if isinstance(reader, Field) else reader(msg)
        return None if given is None else parse_time("the event's time", given)

    def __repr__(self) -> str:
        return f"ReadModel({self.name!r}, fields={[*self.columns]})"


def _rank(version: int | None, time: datetime | None, event_id: str, values: tuple[Any, ...]) -> str:
    """Text that sorts by version, then time, then event id. Ranks are equal only when the values are, too.

    It includes a hash of the values, so that all tables keep the same one of two events that differ only in them.
    """
    version_text = _MISSING if version is None else f"{version:019d}"
    time_text = _MISSING if time is None else sortable(time)
    return f"{version_text} {time_text} {event_id} {blake3(repr(values).encode()).hexdigest(length=8)}"


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
        raise Poison(f"{kind}: the value is not JSON: {error}") from None


def _shown(reader: object) -> str:
    if isinstance(reader, Field):
        return f"field {reader.path}"
    return str(getattr(reader, "__qualname__", reader))


def _check_name(where: str, what: str, name: object) -> None:
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
        raise SettingsError(
            f"{where}: {what}={name!r} cannot name a table or column: expected a letter, then up to 62 letters, digits "
            "and _"
        )


def _fields(where: str, given: object, key: str) -> dict[str, dict[str, ReadModelField]]:
    like = "fields={'OrderPaid': {'paid_at': datetime}}"
    if not isinstance(given, Mapping) or not given:
        raise SettingsError(
            f"{where}: fields must name what each event type writes, got {given!r}; write {like}"
        )
    owners = {key.lower(): "the key", _STATUS: "the status"}
    types: dict[str, str] = {}
    found: dict[str, dict[str, ReadModelField]] = {}
    for kind, facts in given.items():
        if not isinstance(kind, str) or not kind:
            raise SettingsError(f"{where}: an event type must be text, got {kind!r}; write {like}")
        if kind.lower() in types:
            raise SettingsError(
                f"{where}: the event types {types[kind.lower()]!r} and {kind!r} differ only in upper and lower case, "
                "which column names ignore"
            )
        types[kind.lower()] = kind
        if not isinstance(facts, Mapping) or not facts:
            raise SettingsError(
                f"{where}: {kind!r} must write at least one field, got {facts!r}; write {like}"
            )
        found[kind] = {}
        for name, fact in facts.items():
            _check_name(f"{where}, {kind!r}", "field", name)
            if name.lower() in owners:
                raise SettingsError(
                    f"{where}: the field {name!r} of {kind!r} already belongs to {owners[name.lower()]}. A field of "
                    "two event types would need their events in order: give each type a field of its own"
                )
            owners[name.lower()] = repr(kind)
            if not isinstance(fact, ReadModelField):
                try:
                    fact = ReadModelField(fact)  # noqa: PLW2901
                except SettingsError:
                    raise SettingsError(
                        f"{where}: the field {name!r} of {kind!r} must be int, float, str, bool, datetime or "
                        f"ReadModelField(int, 'its.path'), got {fact!r}"
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
            f"{where}: status must be states by time or an SQL expression over the fields, got {given!r}; write "
            "status={'paid': 'paid_at'}"
        )
    kinds = {name: fact.kind for facts in fields.values() for name, fact in facts.items()}
    for state, field in given.items():
        if not isinstance(state, str) or not state:
            raise SettingsError(f"{where}: status: a state must be text, got {state!r}")
        if kinds.get(field) is not datetime:
            times = [name for name, kind in kinds.items() if kind is datetime]
            near = difflib.get_close_matches(str(field), times, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the model has {', '.join(times) or 'no times'}"
            raise SettingsError(
                f"{where}: status: {state!r} needs a time of the model, got {field!r}; {hint}"
            )
    if len(set(given.values())) < len(given):
        raise SettingsError(f"{where}: status: every state needs a time of its own, got {dict(given)!r}")
    return dict(given)
