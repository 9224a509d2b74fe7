"""Orderings: which messages wait for each other.

An :class:`Ordering` names the lane of a message. Messages of one lane run one at a time, in the order of their
partition. Whatever else depends on the ordering (tasks, shared partitions, which policies fit) asks it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from keylane.errors import SettingsError
from keylane.message import last

if TYPE_CHECKING:
    from keylane.message import Message
    from keylane.policies.failure_policy import FailurePolicy

OrderName = Literal["key", "partition", "global", "none"]


class Keyed(Protocol):
    """What is known of a message without reading it."""

    @property
    def key(self) -> bytes | None:
        """The message's key."""

    @property
    def partition(self) -> int:
        """Of the source topic."""


class KeyAndPartition(NamedTuple):
    """A key and the partition it is in: enough for the lane when an ordering does not read messages."""

    key: bytes | None
    partition: int


class Ordering:
    """The base of all orderings. For one of your own, write :meth:`lane_value`; the rest is sound as it is.

    Messages of a partition with the same value are a lane. The same value in another partition is another lane, which
    another task may run at the same time. The object travels to the tasks with the app, so it must be picklable.
    """

    splittable: ClassVar[bool] = False
    """Whether several tasks may share a partition, by the slots of its keys. Only where a key has one lane."""
    max_tasks: ClassVar[int | None] = None
    """How many tasks can run at once, at most. With 1, a lane may span partitions."""
    by_key: ClassVar[bool] = False
    """Whether a lane is a key: what parks, redrives or versions a key needs that."""
    has_lanes: ClassVar[bool] = True
    """Whether any message waits for another."""
    reads_messages: ClassVar[bool] = True
    """Whether the lane depends on more than key and partition."""

    @property
    def name(self) -> str:
        """For telemetry and error messages."""
        return repr(self)

    def lane_value(self, message: Message) -> bytes | None:
        """What makes a lane of its partition; None for a message that waits for no other one.

        ``message.value`` is the bytes of the source, not decoded. The same message must give the same value whenever
        it is read. An exception stops the task.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method lane_value(message)")

    def lane_key(self, message: Message) -> bytes | None:
        """The message's lane, by the name that operators see; None for one that has a lane to itself."""
        value = self.lane_value(message)
        return None if value is None else b"%d/%s" % (message.partition, value)

    def lane_of(self, key: bytes | None, partition: int) -> bytes | None:
        """The lane of a message with this key; None when it has none, or when the message must be read to know."""
        return None if self.reads_messages else self.lane_key(KeyAndPartition(key, partition))  # type: ignore[arg-type]

    def why_not(self, policy: FailurePolicy) -> str | None:
        """Why this policy cannot keep the order, or None."""
        if policy.parks and not self.by_key:
            return (
                f"on_failure={policy!r} puts the lane of a key aside, and with order={self!r} keys have none; "
                "choose 'skip', 'block' or 'block_and_dlq'"
            )
        return None


class _NamedOrdering(Ordering):
    """One of the four that need not read messages. There is one object of each, also after pickling."""

    reads_messages = False
    _NAME: ClassVar[OrderName]

    @property
    def name(self) -> str:
        return self._NAME

    def lane_key(self, message: Keyed) -> bytes | None:
        raise NotImplementedError

    def __repr__(self) -> str:
        return repr(self._NAME)

    def __reduce__(self) -> tuple[Any, ...]:
        return ordering, (self._NAME,)


class _ByKey(_NamedOrdering):
    splittable = True
    by_key = True
    _NAME = "key"

    def lane_key(self, message: Keyed) -> bytes | None:
        return message.key


class _ByPartition(_NamedOrdering):
    _NAME = "partition"

    def lane_key(self, message: Keyed) -> bytes | None:
        return _partition_lane(message.partition)


class _Global(_NamedOrdering):
    max_tasks = 1
    _NAME = "global"

    def lane_key(self, message: Keyed) -> bytes | None:  # noqa: ARG002 - the same for all
        return b"global"

    def why_not(self, policy: FailurePolicy) -> str | None:
        if not policy.stops:
            return (
                f"order='global' with on_failure={policy!r} would let everything after a failed message run without "
                "it; choose on_failure='block' or 'block_and_dlq'"
            )
        return super().why_not(policy)


class _Unordered(_NamedOrdering):
    splittable = True
    has_lanes = False
    _NAME = "none"

    def lane_key(self, message: Keyed) -> bytes | None:  # noqa: ARG002 - the same for all
        return None


class ByHeader(Ordering):
    """Order among the messages of a partition that carry the same value in a header: ``order=ByHeader("tenant")``.

    The last header of that name with a value counts. A message without one waits for no other message and no
    other one waits for it. Raises :class:`SettingsError` for a name that is empty or not text.
    """

    def __init__(self, header: str) -> None:
        given: object = header
        if not isinstance(given, str) or not given:
            raise SettingsError(
                f"ByHeader: expected the name of a header, got {given!r}; write ByHeader('tenant')"
            )
        self._header = header

    def lane_value(self, message: Message) -> bytes | None:
        """The header's value."""
        try:
            return last(message.headers, self._header)
        except UnicodeDecodeError:  # a header's name is not UTF-8: the message becomes a dead letter later
            return None

    def __repr__(self) -> str:
        return f"ByHeader({self._header!r})"


class ByField(Ordering):
    """Order among the messages of a partition with the same value in a JSON field: ``order=ByField("customer.id")``.

    The field is read from the JSON in the message's bytes, whatever the app's ``decode``: each value is parsed once
    more for it. A message whose value is not a JSON object, or without the field, or with null in it, waits for no
    other message and no other one waits for it. Numbers and texts stay apart: ``7`` and ``"7"`` are two lanes.
    Raises :class:`SettingsError` for a path that names nothing.
    """

    def __init__(self, path: str) -> None:
        given: object = path
        if not isinstance(given, str) or not all(given.split(".")):
            raise SettingsError(f"ByField: expected a field or 'field.in.field', got {given!r}")
        self._path = path
        self._names = tuple(path.split("."))

    def lane_value(self, message: Message) -> bytes | None:
        """The field's value as JSON; keys of objects are sorted."""
        value: Any = message.value
        try:
            found = json.loads(value) if isinstance(value, bytes) else None
            for name in self._names:
                found = found.get(name) if isinstance(found, Mapping) else None
            return None if found is None else json.dumps(found, sort_keys=True).encode()
        except (ValueError, RecursionError):
            return None

    def __repr__(self) -> str:
        return f"ByField({self._path!r})"


KEY: Ordering = _ByKey()
PARTITION: Ordering = _ByPartition()
GLOBAL: Ordering = _Global()
NONE: Ordering = _Unordered()
ORDERINGS: Mapping[str, Ordering] = {one.name: one for one in (KEY, PARTITION, GLOBAL, NONE)}
"""Those with a name."""


def ordering(order: object) -> Ordering | None:
    """The ordering of this name, or the object itself; None for anything else."""
    if isinstance(order, Ordering):
        return order
    return ORDERINGS.get(order) if isinstance(order, str) else None


@cache
def _partition_lane(partition: int) -> bytes:
    return b"partition %d" % partition
