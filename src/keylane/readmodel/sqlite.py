"""Read model in a SQLite file, written by handlers with plain upserts."""

from __future__ import annotations

import sqlite3
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

from keylane.errors import SettingsError

if TYPE_CHECKING:
    from pathlib import Path

    from keylane.message import Message
    from keylane.readmodel.fields import ReadModelField
    from keylane.readmodel.model import ReadModel

_TYPES = {int: "INTEGER", float: "REAL", str: "TEXT", bool: "INTEGER", datetime: "TEXT"}
_BUSY_ERRORS = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


class SqliteTable:
    """A read model in a file: the table ``<name>_facts``, and the view ``<name>`` with key, fields and status.

    Handlers call :meth:`apply`, from any thread; tasks on one machine may share a file. When it returns, the events are
    on disk. Times are text in UTC, ``2026-01-31T12:00:00.000000Z``, which sorts like the times.

    Raises :class:`SettingsError` when the file has a table of this name with other columns. SQLite's errors are raised
    as they are (``sqlite3.Error``); a file that stays locked for more than ``timeout`` seconds is transient to an app.
    """

    def __init__(self, model: ReadModel, path: str | Path, *, timeout: float = 30.0) -> None:
        self.model = model
        self._path = path
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(
            path, timeout=timeout, isolation_level=None, check_same_thread=False
        )
        try:
            self._write_ahead(timeout)
            self._connection.execute("PRAGMA synchronous = FULL")
            self._create()
        except BaseException:
            self._connection.close()
            raise
        self._upserts = {kind: self.upsert(kind) for kind in model.fields}

    def upsert(self, event_type: str) -> str:
        """The statement that writes an event of this type: its key, its fields in declared order, its rank."""
        facts, rank = self._facts_table, _quoted(self.model.rank_column(event_type))
        own = [*map(_quoted, self.model.fields[event_type]), rank]
        columns = ", ".join([_quoted(self.model.key), *own])
        assignments = ", ".join(f"{name} = excluded.{name}" for name in own)
        return (
            f"INSERT INTO {facts} ({columns}) VALUES ({', '.join('?' * (len(own) + 1))}) "  # noqa: S608 - checked names
            f"ON CONFLICT ({_quoted(self.model.key)}) DO UPDATE SET {assignments} "
            f"WHERE {facts}.{rank} IS NULL OR excluded.{rank} > {facts}.{rank}"
        )

    def apply(self, *messages: Message) -> int:
        """Write these events in one transaction; returns how many were of the model's types.

        Raises :class:`keylane.Poison` for an event that does not fit; then none is written.
        """
        found = [facts for facts in map(self.model.facts, messages) if facts is not None]
        if not found:
            return 0
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                for facts in found:
                    values = (facts.key, *map(_stored, facts.values), facts.rank)
                    self._connection.execute(self._upserts[facts.type], values)
                self._connection.execute("COMMIT")
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
        return len(found)

    def rows(self) -> list[dict[str, Any]]:
        """The view's rows in key order, with ``datetime`` and ``bool`` values."""
        columns: dict[str, ReadModelField] = self.model.columns
        cursor = self.read(f"SELECT * FROM {_quoted(self.model.name)} ORDER BY {_quoted(self.model.key)}")  # noqa: S608
        return [{name: _loaded(columns.get(name), value) for name, value in row.items()} for row in cursor]

    def read(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        """The rows of any SQL query."""
        with self._lock:
            cursor = self._connection.execute(sql, values)
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _facts_table(self) -> str:
        return _quoted(f"{self.model.name}_facts")

    def _write_ahead(self, timeout: float) -> None:
        """Turn on write-ahead logging, so that readers never wait. SQLite itself does not wait for locks here."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in _BUSY_ERRORS or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    def _create(self) -> None:
        """Create the table and the view. Several tasks may do so at once."""
        model = self.model
        kinds = {model.key: "TEXT"}
        kinds |= {name: _TYPES[fact.kind] for name, fact in model.columns.items()}
        kinds |= {model.rank_column(kind): "TEXT" for kind in model.fields}
        columns = [f"{_quoted(name)} {kind}" for name, kind in kinds.items()]
        columns[0] += " PRIMARY KEY NOT NULL"
        shown = [_quoted(name) for name in (model.key, *model.columns)]
        status = model.status_sql()
        if status is not None:
            shown.append(f"({status}) AS status")
        view = f"CREATE VIEW {_quoted(model.name)} AS SELECT {', '.join(shown)} FROM {self._facts_table}"  # noqa: S608
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        try:
            execute(f"CREATE TABLE IF NOT EXISTS {self._facts_table} ({', '.join(columns)})")
            existing = {row[1]: row[2] for row in execute(f"PRAGMA table_info({self._facts_table})")}
            if existing != kinds:
                raise SettingsError(
                    f"{self._path}: the table {model.name}_facts has the columns {', '.join(existing)}, and the model "
                    f"has {', '.join(kinds)}. Use another file, and let the app read its topic from the beginning"
                )
            known = execute(
                "SELECT sql FROM sqlite_master WHERE type = 'view' AND name = ?", (model.name,)
            ).fetchone()
            if known is None or known[0] != view:
                execute(f"DROP VIEW IF EXISTS {_quoted(model.name)}")
                execute(view)
            execute("COMMIT")
        except BaseException:
            execute("ROLLBACK")
            raise


def _quoted(name: str) -> str:
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def _stored(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return value


def _loaded(fact: ReadModelField | None, value: Any) -> Any:
    if fact is None or value is None:
        return value
    if fact.kind is datetime:
        return datetime.fromisoformat(value).astimezone(UTC)
    return bool(value) if fact.kind is bool else value
