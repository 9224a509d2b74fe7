"""Which partitions are read, and where reading begins and ends: what was asked for, as offsets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]  # re-exported there without saying so

from keylane.errors import BrokerError, SettingsError
from keylane.kafka.cluster import Cluster
from keylane.kafka.offset_range import OffsetRange, lost

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from keylane.kafka.settings import KafkaSettings

Place = tuple[str, int]
"""Topic and partition."""

EARLIEST, LATEST = -2, -1
"""Spark's numbers for them, in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSelection:
    """Topics by name, by a pattern, or single partitions: one of the three."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    places: tuple[Place, ...] = ()

    @property
    def named(self) -> set[str]:
        """The topics that have to be there."""
        return {*self.topics, *(topic for topic, _ in self.places)}


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetBound:
    """Where reading begins, or ends: one number for all, or one for each partition.

    ``at`` are offsets, EARLIEST and LATEST among them, or ``times``: milliseconds since 1970. ``option`` names it in
    errors.
    """

    option: str
    at: int | Mapping[Place, int]
    times: bool = False
    or_latest: bool = False
    """Whether a time after the last message means the end; if not, it is an error."""


class OffsetResolver:
    """Of the topics behind one address. Methods raise :class:`BrokerError` when they get no answer."""

    def __init__(self, settings: KafkaSettings, selection: TopicSelection, *, committed: bool) -> None:
        self._cluster = Cluster(settings)
        self._selection = selection
        self._committed = committed

    def places(self, *, strict: bool = True) -> list[Place]:
        """The partitions there are now.

        Raises :class:`BrokerError` when a topic or partition that was named does not exist, unless it may be left out.
        """
        selection, counts = self._selection, self._cluster.topics()
        if selection.pattern is not None:
            pattern = re.compile(selection.pattern)
            named = {topic for topic in counts if pattern.fullmatch(topic) and not topic.startswith("__")}
        else:
            named = selection.named
            for topic in sorted(named - counts.keys() if strict else ()):
                self._cluster.partitions(topic)  # says what there is instead
        there = [(topic, partition) for topic in named for partition in range(counts.get(topic, 0))]
        if not selection.places:
            return sorted(there)
        for topic, partition in sorted(set(selection.places).difference(there) if strict else ()):
            raise BrokerError(
                f"option assign: topic {topic!r} has no partition {partition}, only 0 to {counts[topic] - 1}"
            )
        return sorted(set(selection.places).intersection(there))

    def earliest(self, places: Iterable[Place]) -> dict[Place, int]:
        """Where they begin."""
        spec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
        return self._cluster.offsets(dict.fromkeys(places, spec), committed=self._committed)

    def latest(self, places: Iterable[Place]) -> dict[Place, int]:
        """Where they end; for who reads only what is committed, where the first open transaction begins."""
        spec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        return self._cluster.offsets(dict.fromkeys(places, spec), committed=self._committed)

    def since(self, times: Mapping[Place, int]) -> dict[Place, int]:
        """The first message at or after these milliseconds; -1 where there is none."""
        specs = {place: OffsetSpec.for_timestamp(max(0, at)) for place, at in times.items()}
        return self._cluster.offsets(specs, committed=self._committed)

    def resolve(self, edge: OffsetBound, places: list[Place], *, fail_on_loss: bool) -> dict[Place, int]:
        """The edge as offsets. Raises :class:`SettingsError` when it does not fit the partitions there are."""
        at = dict.fromkeys(places, edge.at) if isinstance(edge.at, int) else dict(edge.at)
        _fits(edge, at, places)
        if edge.times:
            found = self.since(at)
            late = [place for place, offset in found.items() if offset < 0]
            if late and not edge.or_latest:
                topic, partition = late[0]
                raise SettingsError(
                    f"option {edge.option}: {topic}/{partition} has no message at or after {at[late[0]]} "
                    "(milliseconds since 1970). With startingOffsetsByTimestampStrategy=latest reading begins at its "
                    "end"
                )
            return found | self.latest(late)
        found = at | self.earliest([p for p in places if at[p] == EARLIEST])
        for place, end in self.latest([p for p in places if at[p] != EARLIEST]).items():
            if at[place] > end:
                what = f"option {edge.option}: {place[0]}/{place[1]} ends at offset {end}, before {at[place]}"
                lost(what, fail=fail_on_loss)
            found[place] = end if at[place] == LATEST else min(at[place], end)
        return found

    def spans(
        self, starts: Mapping[Place, int], ends: Mapping[Place, int], *, fail_on_loss: bool
    ) -> list[OffsetRange]:
        """From each start to its end, as far as that is still there. Raises :class:`keylane.errors.DataLossError`."""
        begin, found = self.earliest(ends), []
        for (topic, partition), end in sorted(ends.items()):
            start = starts[topic, partition]
            if start < begin[topic, partition] and start < end:
                gone = min(begin[topic, partition], end)
                lost(f"{topic}/{partition}: offsets {start} to {gone - 1} are gone", fail=fail_on_loss)
                start = gone
            if start < end:
                found.append(OffsetRange(topic, partition, start, end))
        return found


def _fits(edge: OffsetBound, at: Mapping[Place, int], places: list[Place]) -> None:
    """A partition that was forgotten, or that does not exist, is a mistake in the option."""
    for topic, partition in places:
        if (topic, partition) not in at:
            hint = "" if edge.times else " (-2 for its beginning, -1 for its end)"
            raise SettingsError(
                f"option {edge.option}: {topic}/{partition} is missing; name every partition that is read{hint}"
            )
    for topic, partition in at:
        if (topic, partition) not in places:
            raise SettingsError(f"option {edge.option}: {topic}/{partition} is not among the partitions read")
