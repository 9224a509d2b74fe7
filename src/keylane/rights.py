"""Rights that apps, operators and other clients need at a broker that denies everything else.

The table in ``docs/operations.md``, the doctor's findings, the users of the embedded broker and the texts of errors all
come from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from keylane.topic_names import (
    dead_letter_topic,
    lane_state_topic,
    ledger_topic,
    state_topic,
    telemetry_topic,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class ResourceKind(StrEnum):
    """What a right is about."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional id"


class Operation(StrEnum):
    """What a right allows. ``READ`` and ``WRITE`` include ``DESCRIBE``."""

    READ = "Read"
    WRITE = "Write"
    CREATE = "Create"
    ALTER = "Alter"
    DESCRIBE = "Describe"
    DESCRIBE_CONFIGS = "DescribeConfigs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """One operation on one resource. ``prefix``: on all resources whose names begin with ``name``."""

    kind: ResourceKind
    name: str
    operation: Operation
    prefix: bool = False
    why: str = ""
    """What it is for, as a phrase."""
    optional: bool = False
    """Whether everything but what ``why`` says works without it."""

    def __str__(self) -> str:
        """As errors and findings name it: ``Write on topic 'receipts'``."""
        kind = f"{self.kind}s that begin with" if self.prefix else self.kind
        return f"{self.operation} on {kind} {self.name!r}"


def on_topic(name: str, operation: Operation, why: str = "", *, optional: bool = False) -> Right:
    """A right on one topic."""
    return Right(kind=ResourceKind.TOPIC, name=name, operation=operation, why=why, optional=optional)


def on_group(name: str, operation: Operation, why: str = "") -> Right:
    """A right on one consumer group."""
    return Right(kind=ResourceKind.GROUP, name=name, operation=operation, why=why)


def on_transactional_ids(app: str) -> Right:
    """The right to write an app's progress."""
    return Right(
        kind=ResourceKind.TRANSACTIONAL_ID,
        name=f"{app}.",
        operation=Operation.WRITE,
        prefix=True,
        why="progress is written in transactions, and each task has an id of its own",
    )


def app_rights(
    app: str, source: str, sinks: Sequence[str], *, ledger: bool, states: bool = False
) -> tuple[Right, ...]:
    """What a running app needs. Enough for the operators' commands too. ``states``: its stages keep lane state."""
    read, write, create = Operation.READ, Operation.WRITE, Operation.CREATE
    state, dlq, telemetry, book = (
        named(app) for named in (state_topic, dead_letter_topic, telemetry_topic, ledger_topic)
    )
    found = [
        on_topic(source, read, "its messages"),
        on_topic(source, Operation.DESCRIBE_CONFIGS, "its size limit, for the app's own topics"),
    ]
    for sink in sinks:
        found += [
            on_topic(sink, write, "results"),
            on_topic(sink, Operation.DESCRIBE_CONFIGS, "its size limit, and who sets timestamps"),
        ]
    found += [
        on_topic(state, read, "stopped lanes, owners, commands"),
        on_topic(state, write, "the same"),
        on_topic(dlq, read, "redriving dead letters", optional=True),
        on_topic(
            dlq,
            write,
            "dead letters; without it they stay in the spool, and with `exactly_once` the run ends",
            optional=True,
        ),
        on_topic(telemetry, read, "`keylane lag` and `metrics` of an app that runs", optional=True),
        on_topic(telemetry, write, "telemetry; the app runs without it", optional=True),
    ]
    if ledger:
        found += [
            on_topic(book, read, "`keylane verify`", optional=True),
            on_topic(book, write, "a record of every attempt"),
        ]
    if states:
        found += [
            on_topic(lane_state_topic(app), read, "lane state, only for apps that keep some"),
            on_topic(lane_state_topic(app), write, "lane state, only for apps that keep some"),
        ]
    more = [*([book] if ledger else []), *([lane_state_topic(app)] if states else [])]
    names = [state, dlq, telemetry, *more]
    found += [
        on_topic(name, create, "the first start, unless it exists", optional=name == telemetry)
        for name in names
    ]
    found += [
        on_topic(name, Operation.ALTER, "partitions that are added to the source later", optional=True)
        for name in (state, dlq, *more)
    ]
    found += [on_group(app, read, "progress"), on_transactional_ids(app)]
    return tuple(found)


def operator_rights(app: str, source: str, sinks: Sequence[str], *, ledger: bool) -> tuple[Right, ...]:
    """What a person needs who looks after an app with a user of their own, and does not run it."""
    read, write = Operation.READ, Operation.WRITE
    found = [
        on_topic(source, read, "`keylane lag`: the age and key of the oldest message"),
        on_topic(state_topic(app), read, "`lanes`, `lag`, `plan`, and answers to commands"),
        on_topic(state_topic(app), write, "`lanes release`, `skip` …, `dlq redrive`, `versions`"),
        on_topic(dead_letter_topic(app), read, "`dlq`"),
        on_topic(telemetry_topic(app), read, "`lag`, `metrics`", optional=True),
        on_group(app, Operation.DESCRIBE, "progress"),
    ]
    if ledger:
        found.append(on_topic(ledger_topic(app), read, "`verify`", optional=True))
        found += [on_topic(sink, read, "`verify`", optional=True) for sink in sinks]
    return tuple(found)


def publisher_rights(topic: str) -> tuple[Right, ...]:
    """What a ``Publisher`` needs."""
    return (
        on_topic(topic, Operation.WRITE, "messages"),
        on_topic(
            topic,
            Operation.DESCRIBE_CONFIGS,
            "an early error for a message that is larger than the topic takes",
            optional=True,
        ),
    )


def reader_rights(topic: str) -> tuple[Right, ...]:
    """What ``keylane.topic`` needs to read a topic as a table or a stream."""
    return (on_topic(topic, Operation.READ, "its messages"),)


_HEAD = "| who | resource | operations | for |\n|---|---|---|---|\n"


def rights_table() -> str:
    """The rights of everybody, as a table for the documentation."""
    app, source, sinks = "<app>", "the source", ["the sink"]
    roles = {
        "the app": app_rights(app, source, sinks, ledger=True, states=True),
        "an operator": operator_rights(app, source, sinks, ledger=True),
        "`Publisher`": publisher_rights("the topic"),
        "`keylane.topic`": reader_rights("the topic"),
    }
    rows: list[str] = []
    for role, rights in roles.items():
        grouped: dict[tuple[str, str, bool], list[str]] = {}
        for right in rights:
            grouped.setdefault((_resource(right), right.why, right.optional), []).append(
                f"`{right.operation}`"
            )
        who = role
        for (resource, why, optional), operations in grouped.items():
            rows.append(
                f"| {who} | {resource} | {', '.join(operations)} | {'optional: ' * optional}{why} |\n"
            )
            who = ""
    return _HEAD + "".join(rows)


def _resource(right: Right) -> str:
    name = right.name if right.name.startswith("the ") else f"`{right.name}`"
    if right.prefix:
        return f"{right.kind}s that begin with {name}"
    return name if right.kind is ResourceKind.TOPIC else f"{right.kind} {name}"
