"""The options of ``keylane.topic``: the names and meanings of Spark's own Kafka source."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane import strict_json as wire
from keylane.errors import SettingsError
from keylane.kafka.offset_resolver import EARLIEST, LATEST, OffsetBound, PartitionId, TopicSelection
from keylane.kafka.settings import BOOTSTRAP, client_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from keylane.kafka.settings import KafkaSettings

_GROUP = "kafka.group.id"
_WHICH = ("subscribe", "subscribePattern", "assign")
_STARTS = ("startingOffsets", "startingOffsetsByTimestamp", "startingTimestamp")
_ENDS = ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp")
_STRATEGY = "startingOffsetsByTimestampStrategy"
_KNOWN = (
    "bootstrap",
    BOOTSTRAP,
    *_WHICH,
    *_STARTS,
    _STRATEGY,
    *_ENDS,
    "minPartitions",
    "maxOffsetsPerTrigger",
    "failOnDataLoss",
    "includeHeaders",
)
_ISOLATION = "isolation.level"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicOptions:
    """What is read of which topics.

    ================================ ==========================================================================
    ``subscribe``                    topics, with commas
    ``subscribePattern``             a regular expression of topics' names; the broker's own (``__…``) excepted
    ``assign``                       partitions: ``{"topic": [0, 2]}``
    ``startingOffsets``              ``earliest``, ``latest`` or ``{"topic": {"0": 23, "1": -2}}`` (-2 earliest,
                                     -1 latest); by default a table begins at the earliest, a stream at the latest
    ``startingTimestamp``,           the first message at or after this time in milliseconds since 1970, for all
    ``startingOffsetsByTimestamp``   partitions or each; ``startingOffsetsByTimestampStrategy`` says what happens
                                                                      if there is none: ``error`` or ``latest``
    ``endingOffsets`` …              the same for the end of a table; latest by default
    ``minPartitions``                at least about this many Spark partitions
    ``maxOffsetsPerTrigger``         for a stream: at most this many offsets in a micro-batch
    ``failOnDataLoss``               whether missing messages are an error; true
    ``includeHeaders``               whether there is a column ``headers``; false
    ``bootstrap``                    the broker's address; also ``kafka.bootstrap.servers``
    ``kafka.…``                      any setting of librdkafka; ``kafka.isolation.level`` is read_committed
    ================================ ==========================================================================
    """

    settings: KafkaSettings
    group: str
    selection: TopicSelection
    starting: OffsetBound
    ending: OffsetBound
    committed: bool
    min_partitions: int | None
    max_per_trigger: int | None
    fail_on_loss: bool
    headers: bool

    @classmethod
    def parse(cls, given: Mapping[str, str], *, stream: bool, bootstrap: str | None = None) -> TopicOptions:
        """Options from what the user gave, whose names Spark has put into lower case.

        Raises :class:`SettingsError` that names the option and what to do.
        """
        found, extra = _sorted_out(given)
        for name in ("maxOffsetsPerTrigger",) if not stream else _ENDS:
            if name in found:
                kind = "stream, which has no end" if stream else "table; it is for readStream"
                raise SettingsError(f"option {name!r} is not valid for a {kind}")
        address = found.get("bootstrap") or found.get(BOOTSTRAP) or bootstrap
        address = address or os.environ.get("KEYLANE_BOOTSTRAP")
        if not address:
            raise SettingsError(
                f"no broker address: set the option {BOOTSTRAP!r}, or KEYLANE_BOOTSTRAP before register(spark)"
            )
        level = extra.pop(_ISOLATION, "read_committed")  # only for the consumer
        if level not in ("read_committed", "read_uncommitted"):
            raise SettingsError(
                f"option kafka.{_ISOLATION} must be read_committed or read_uncommitted, got {level!r}"
            )
        return cls(
            settings=client_settings(address, extra),
            group=given.get(_GROUP) or "keylane.topic",
            selection=_selection(found),
            starting=_starting(found, stream=stream),
            ending=_ending(found),
            committed=level == "read_committed",
            min_partitions=_count("minPartitions", found.get("minPartitions")),
            max_per_trigger=_count("maxOffsetsPerTrigger", found.get("maxOffsetsPerTrigger")),
            fail_on_loss=_yes("failOnDataLoss", found.get("failOnDataLoss", "true")),
            headers=_yes("includeHeaders", found.get("includeHeaders", "false")),
        )


def _sorted_out(given: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Our options by their names, and librdkafka's."""
    names = {name.lower(): name for name in _KNOWN}
    found, extra = {}, {}
    for name, value in given.items():
        lower = name.lower()
        if lower in names:
            found[names[lower]] = value
        elif lower == "path":
            raise SettingsError(
                f"load({value!r}): expected no path; set the topic with the option 'subscribe'"
            )
        elif not lower.startswith("kafka."):
            near = difflib.get_close_matches(lower, names, n=1)
            hint = f"; did you mean {names[near[0]]!r}?" if near else f". Known: {', '.join(_KNOWN)}, kafka.*"
            raise SettingsError(f"unknown option {name!r}{hint}")
        elif lower != _GROUP:
            extra[lower.removeprefix("kafka.")] = value
    return found, extra


def _one_of(found: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """The one that was given, or None."""
    given = [name for name in names if name in found]
    if len(given) > 1:
        raise SettingsError(f"options {given[0]!r} and {given[1]!r} exclude each other: give one of them")
    return given[0] if given else None


def _selection(found: Mapping[str, str]) -> TopicSelection:
    which = _one_of(found, _WHICH)
    if which is None:
        raise SettingsError(
            "no topic: set the option 'subscribe' (topics, separated by commas), 'subscribePattern' or 'assign'"
        )
    value = found[which]
    if which == "subscribe":
        topics = tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
        if not topics:
            raise SettingsError(f"option subscribe must name a topic, got {value!r}")
        return TopicSelection(topics=topics)
    if which == "subscribePattern":
        try:
            re.compile(value)
        except re.error as error:
            raise SettingsError(
                f"option subscribePattern must be a regular expression, got {value!r}: {error}"
            ) from None
        return TopicSelection(pattern=value)
    places = _json(which, value, '{"topic": [0, 2]}', _assigned)
    return TopicSelection(places=tuple(sorted(set(places))))


def _starting(found: Mapping[str, str], *, stream: bool) -> OffsetBound:
    which = _one_of(found, _STARTS) or "startingOffsets"
    strategy = found.get(_STRATEGY, "error")
    if strategy not in ("error", "latest"):
        raise SettingsError(f"option {_STRATEGY} must be error or latest, got {strategy!r}")
    if which != "startingOffsets":
        return _times(which, found[which], or_latest=strategy == "latest")
    edge = _offsets(which, found.get(which, "latest" if stream else "earliest"))
    if not stream and LATEST in _numbers(edge):
        raise SettingsError("option startingOffsets: a table that begins at the end (latest, -1) has no rows")
    return edge


def _ending(found: Mapping[str, str]) -> OffsetBound:
    which = _one_of(found, _ENDS) or "endingOffsets"
    if which != "endingOffsets":
        return _times(which, found[which], or_latest=True)
    edge = _offsets(which, found.get(which, "latest"))
    if EARLIEST in _numbers(edge):
        raise SettingsError(
            "option endingOffsets: a table that ends at the beginning (earliest, -2) has no rows"
        )
    return edge


def _numbers(edge: OffsetBound) -> set[int]:
    return {edge.at} if isinstance(edge.at, int) else set(edge.at.values())


def _offsets(option: str, value: str) -> OffsetBound:
    named = {"earliest": EARLIEST, "latest": LATEST}
    if value.lower() in named:
        return OffsetBound(option=option, at=named[value.lower()])
    like = 'earliest, latest or JSON such as {"topic": {"0": 23, "1": -2}}'
    return OffsetBound(option=option, at=_json(option, value, like, lambda text: _each(text, EARLIEST)))


def _times(option: str, value: str, *, or_latest: bool) -> OffsetBound:
    at: int | dict[PartitionId, int]
    if option.endswith("Timestamp") and "Offsets" not in option:
        if not re.fullmatch(r"\s*\d{1,18}\s*", value):
            raise SettingsError(f"option {option} must be milliseconds since 1970, got {value!r}")
        at = int(value)
    else:
        like = 'JSON such as {"topic": {"0": 1700000000000}}, in milliseconds since 1970'
        at = _json(option, value, like, lambda text: _each(text, 0))
    return OffsetBound(option=option, at=at, times=True, or_latest=or_latest)


def _json(option: str, value: str, like: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(value)
    except (TypeError, ValueError, AttributeError):
        raise SettingsError(f"option {option} must be {like}, got {value!r:.200}") from None


def _each(text: str, least: int) -> dict[PartitionId, int]:
    """``{"topic": {"0": 23}}``. Raises ValueError, TypeError or AttributeError for anything else."""
    found = {
        (topic, int(partition)): number
        for topic, numbers in wire.loads(text).items()
        for partition, number in numbers.items()
    }
    if any(p < 0 or type(number) is not int or number < least for (_, p), number in found.items()):
        raise ValueError(text)
    return found


def _assigned(text: str) -> list[PartitionId]:
    """``{"topic": [0, 2]}``."""
    found = [(topic, p) for topic, partitions in wire.loads(text).items() for p in partitions]
    if not found or any(type(p) is not int or p < 0 for _, p in found):
        raise ValueError(text)
    return found


def _count(name: str, value: str | None) -> int | None:
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,18}", value.strip()) or int(value) < 1:
        raise SettingsError(f"option {name} must be a whole number of at least 1, got {value!r}")
    return int(value)


def _yes(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise SettingsError(f"option {name} must be true or false, got {value!r}")
    return value.lower() == "true"
