"""Resolver of a topic selection and its bounds into partitions and offsets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]  # re-exported there without saying so

from keylane.errors import BrokerError, SettingsError
from keylane.kafka.cluster import Cluster
from keylane.kafka.offset_range import OffsetRange, report_loss

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from keylane.kafka.settings import KafkaSettings

PartitionId = tuple[str, int]
"""Topic and partition number."""

EARLIEST, LATEST = -2, -1
"""Spark's numbers for the earliest and the latest offset in its JSON options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSelection:
    """Topics by name, topics by pattern, or single partitions. Only one of the three is set."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    places: tuple[PartitionId, ...] = ()

    @property
    def named(self) -> set[str]:
        """The topics that must exist."""
        return {*self.topics, *(topic for topic, _ in self.places)}


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetBound:
    """Where reading begins or ends: one number for all partitions, or one for each.

    ``at``: offsets, including EARLIEST and LATEST; with ``times``, milliseconds since 1970. ``option``: the option's
    name, for errors.
    """

    option: str
    at: int | Mapping[PartitionId, int]
    times: bool = False
    or_latest: bool = False
    """Whether a time after the last message means the end of the partition. Otherwise it is an error."""


class OffsetResolver:
    """Resolves a selection in one cluster. Methods raise :class:`BrokerError` if the cluster does not answer."""

    def __init__(self, settings: KafkaSettings, selection: TopicSelection, *, committed: bool) -> None:
        self._cluster = Cluster(settings)
        self._selection = selection
        self._committed = committed

    def places(self, *, strict: bool = True) -> list[PartitionId]:
        """The selected partitions that exist now.

        ``strict``: raise :class:`BrokerError` if a topic or partition that the selection names does not exist.
        """
        selection, counts = self._selection, self._cluster.topics()
        if selection.pattern is not None:
            pattern = re.compile(selection.pattern)
            named = {topic for topic in counts if pattern.fullmatch(topic) and not topic.startswith("__")}
        else:
            named = selection.named
            for topic in sorted(named - counts.keys() if strict else ()):
                self._cluster.partitions(topic)  # raises, and lists the existing topics
        existing = [(topic, partition) for topic in named for partition in range(counts.get(topic, 0))]
        if not selection.places:
            return sorted(existing)
        for topic, partition in sorted(set(selection.places).difference(existing) if strict else ()):
            raise BrokerError(
                f"option assign: topic {topic!r} has no partition {partition}, only 0 to {counts[topic] - 1}"
            )
        return sorted(set(selection.places).intersection(existing))

    def earliest(self, places: Iterable[PartitionId]) -> dict[PartitionId, int]:
        """The first offset of each partition."""
        spec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
        return self._cluster.offsets(dict.fromkeys(places, spec), committed=self._committed)

    def latest(self, places: Iterable[PartitionId]) -> dict[PartitionId, int]:
        """The end of each partition; with ``committed``, the last stable offset."""
        spec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        return self._cluster.offsets(dict.fromkeys(places, spec), committed=self._committed)

    def since(self, times: Mapping[PartitionId, int]) -> dict[PartitionId, int]:
        """The first offset at or after these times in milliseconds since 1970; -1 if there is none."""
        specs = {place: OffsetSpec.for_timestamp(max(0, at)) for place, at in times.items()}
        return self._cluster.offsets(specs, committed=self._committed)

    def resolve(
        self, bound: OffsetBound, places: list[PartitionId], *, fail_on_loss: bool
    ) -> dict[PartitionId, int]:
        """The bound as offsets.

        Raises :class:`SettingsError` if it does not fit the partitions, :class:`keylane.errors.DataLossError` if a
        partition ends before it.
        """
        at = dict.fromkeys(places, bound.at) if isinstance(bound.at, int) else dict(bound.at)
        _check_partitions(bound, at, places)
        if bound.times:
            found = self.since(at)
            late = [place for place, offset in found.items() if offset < 0]
            if late and not bound.or_latest:
                topic, partition = late[0]
                raise SettingsError(
                    f"option {bound.option}: {topic}/{partition} has no message at or after {at[late[0]]} "
                    "(milliseconds since 1970). With startingOffsetsByTimestampStrategy=latest, it begins at its end"
                )
            return found | self.latest(late)
        found = at | self.earliest([p for p in places if at[p] == EARLIEST])
        for place, end in self.latest([p for p in places if at[p] != EARLIEST]).items():
            if at[place] > end:
                what = (
                    f"option {bound.option}: {place[0]}/{place[1]} ends at offset {end}, before {at[place]}"
                )
                report_loss(what, fail=fail_on_loss)
            found[place] = end if at[place] == LATEST else min(at[place], end)
        return found

    def ranges(
        self, starts: Mapping[PartitionId, int], ends: Mapping[PartitionId, int], *, fail_on_loss: bool
    ) -> list[OffsetRange]:
        """The range from each start to its end, without offsets that retention has deleted.

        Raises :class:`keylane.errors.DataLossError` for deleted offsets if ``fail_on_loss``.
        """
        begin, found = self.earliest(ends), []
        for (topic, partition), end in sorted(ends.items()):
            start = starts[topic, partition]
            if start < begin[topic, partition] and start < end:
                gone = min(begin[topic, partition], end)
                report_loss(f"{topic}/{partition}: offsets {start} to {gone - 1} are gone", fail=fail_on_loss)
                start = gone
            if start < end:
                found.append(OffsetRange(topic, partition, start, end))
        return found


def _check_partitions(bound: OffsetBound, at: Mapping[PartitionId, int], places: list[PartitionId]) -> None:
    """Raise SettingsError unless the bound names exactly the partitions that are read."""
    for topic, partition in places:
        if (topic, partition) not in at:
            hint = "" if bound.times else " (-2 for its beginning, -1 for its end)"
            raise SettingsError(
                f"option {bound.option}: {topic}/{partition} is missing; name every partition that is read{hint}"
            )
    for topic, partition in at:
        if (topic, partition) not in places:
            raise SettingsError(
                f"option {bound.option}: {topic}/{partition} is not among the partitions read"
            )
