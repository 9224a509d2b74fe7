"""Results of a message: what a handler returned, as the records to write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane.engine.result_ids import result_headers, result_id_prefix
from keylane.errors import Poison
from keylane.event import encode_key
from keylane.handlers.encoding import as_bytes
from keylane.message import EVENT_ID
from keylane.result import Result, ResultKey, YieldedResults

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from keylane.engine.delivery import Delivery
    from keylane.message import Headers
    from keylane.spec import AppSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRecord:
    """One result, ready to be written."""

    topic: str
    """One of the app's ``sinks``; empty where results do not go to a topic."""
    key: bytes | None
    value: bytes | None
    headers: Headers
    """With the result's own ``event-id`` as the last."""
    timestamp: int | None
    """In milliseconds since 1970, if known."""
    plain: bool
    """Whether it has nothing of its own but its value."""


class ResultMaker:
    """Makes the records of one app's results. Has no state."""

    def __init__(self, app: AppSpec) -> None:
        self._app = app
        self._sinks = app.sinks
        self._default = app.sink or ""
        own = app.encode
        self._encoders: Mapping[str, Callable[[Any], bytes | None]] = (
            own if isinstance(own, Mapping) else {} if own is None else dict.fromkeys(app.sinks or ("",), own)
        )
        self.plain_encoder = self._encoders.get(self._default)
        """The app's own ``encode`` for a result without a topic, if there is one."""

    def records(self, delivery: Delivery, returned: Any, stage: str, handler: str = "") -> list[ResultRecord]:
        """The records of what ``stage`` returned, in order. None makes no record.

        ``handler``: of several handlers of a message, whose it is. Raises :class:`Poison` for what cannot be written,
        naming the stage.
        """
        given = [one for one in _several(returned, stage) if one is not None]
        return [self._record(delivery, one, stage, handler, index) for index, one in enumerate(given)]

    def encode(self, value: Any, stage: str, topic: str | None = None) -> bytes | None:
        """A value as the bytes for a topic, the default one if not given. Raises :class:`Poison` naming the stage."""
        if isinstance(value, bytes):
            return value
        own = self._encoders.get(self._default if topic is None else topic)
        try:
            found = as_bytes(value) if own is None else own(value)
        except (TypeError, ValueError) as error:
            why = "is neither bytes, nor text, nor JSON" if own is None else "encode= cannot write"
            raise Poison(f"stage {stage!r} returned a {type(value).__name__} that {why}: {error}") from error
        if found is not None and not isinstance(found, bytes):
            raise Poison(
                f"encode= of app {self._app.name!r} must return bytes, or None for a null value; it returned a "
                f"{type(found).__name__} for the result of stage {stage!r}"
            )
        return found

    def _record(self, delivery: Delivery, given: Any, stage: str, handler: str, index: int) -> ResultRecord:
        prefix = result_id_prefix(self._app.name, handler, index)
        if type(given) is not Result:
            return ResultRecord(
                topic=self._default,
                key=delivery.key,
                value=self.encode(given, stage),
                headers=result_headers(delivery, prefix),
                timestamp=delivery.timestamp,
                plain=True,
            )
        topic = self._topic(given.topic, stage)
        headers = result_headers(delivery, prefix)
        added = _headers(given.headers, stage)
        if added:
            names = {name for name, _ in added}
            kept = [each for each in headers[:-1] if each[0] not in names]
            headers = [*kept, *(each for each in added if each[1] is not None), headers[-1]]
        if given.timestamp is not None and (type(given.timestamp) is not int or given.timestamp < 0):
            raise Poison(
                f"stage {stage!r} returned a Result whose timestamp is {given.timestamp!r}; expected milliseconds "
                "since 1970, a whole number"
            )
        return ResultRecord(
            topic=topic,
            key=delivery.key if given.key is ResultKey.OF_MESSAGE else _key(given.key, stage),
            value=None if given.value is None else self.encode(given.value, stage, topic),
            headers=headers,
            timestamp=delivery.timestamp if given.timestamp is None else given.timestamp,
            plain=given.key is ResultKey.OF_MESSAGE
            and given.topic is None
            and given.timestamp is None
            and not added,
        )

    def _topic(self, topic: object, stage: str) -> str:
        if topic is None:
            return self._default
        if topic in self._sinks:
            return str(topic)
        where = f"stage {stage!r} returned a Result for topic {topic!r}"
        if not self._sinks:
            custom = self._app.custom_sink
            to = "rows of Spark" if custom is None else type(custom).__name__
            raise Poison(f"{where}, but the results of app {self._app.name!r} go to {to}: leave out topic=")
        raise Poison(
            f"{where}, which is not a sink of app {self._app.name!r}; its sinks are "
            f"{', '.join(map(repr, self._sinks))}. Declare it: App(sinks=(…, {topic!r}))"
        )


def is_several(returned: Any) -> bool:
    """Whether this is not one plain value: a :class:`Result`, what a generator yielded, or a list with Results."""
    kind = type(returned)
    return (
        kind is Result
        or kind is YieldedResults
        or (kind in (list, tuple) and any(type(one) is Result for one in returned))
    )


def only_row(records: Sequence[ResultRecord], where: str) -> ResultRecord:
    """The one record of a message whose result is a field of a row. Raises :class:`Poison` if a row cannot hold it."""
    if len(records) > 1:
        raise Poison(
            f"{len(records)} results of one message; {where} has one row for a message, with one result: let the "
            "handlers of a message return one result together"
        )
    if not records[0].plain:
        raise Poison(
            f"a Result with a key, headers, topic or timestamp of its own; {where} has only the result's value: "
            "return the value"
        )
    return records[0]


def _several(returned: Any, stage: str) -> Iterable[Any]:
    kind = type(returned)
    if kind is YieldedResults:
        return list(returned)
    if kind in (list, tuple) and (found := [type(one) is Result for one in returned]) and any(found):
        if not all(found):
            raise Poison(
                f"stage {stage!r} returned a {kind.__name__} with Results and other values; return only Results, or "
                "yield each result"
            )
        return list(returned)
    return (returned,)


def _key(key: object, stage: str) -> bytes | None:
    try:
        return None if key is None else encode_key(key)
    except TypeError as error:
        raise Poison(f"stage {stage!r} returned a Result whose key cannot be written: {error}") from None


def _headers(given: Any, stage: str) -> Headers:
    where = f"stage {stage!r} returned a Result whose headers"
    if not isinstance(given, Mapping | Iterable) or isinstance(given, str | bytes):
        raise Poison(f"{where} are a {type(given).__name__}; expected a dict, or a list of names and values")
    made: Headers = []
    for pair in given.items() if isinstance(given, Mapping) else given:
        try:
            name, content = pair
        except (TypeError, ValueError):
            raise Poison(f"{where} contain {pair!r}; expected a name and a value") from None
        if not isinstance(name, str) or not (content is None or isinstance(content, str | bytes)):
            raise Poison(f"{where} contain {name!r}: {content!r}; expected a name and text, bytes or None")
        if name == EVENT_ID:
            raise Poison(
                f"{where} contain {EVENT_ID!r}, which Keylane derives from the message; leave it out"
            )
        made.append((name, content.encode() if isinstance(content, str) else content))
    return made
