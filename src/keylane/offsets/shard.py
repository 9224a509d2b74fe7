"""A shard: the share of the source's partitions that one of several runs of an app processes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SHARDS_MAX = 10_000
"""As many as partitions of a large topic: a shard needs one at the least."""
_TEXT = re.compile(r"([1-9]\d{0,5})/([1-9]\d{0,5})")


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard ``number`` of ``count``; the first one is 1. Raises ValueError if there is no such shard.

    A partition belongs to a shard by its number, modulo ``count``. So neighbours, which are often equally old and
    equally loaded, are spread over the shards, and a partition that is added belongs to a shard without a list. While
    ``count`` divides the number of partitions before and after, a key that moves to an added partition stays in its
    shard: Kafka takes the hash modulo the number of partitions.
    """

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count <= SHARDS_MAX:
            raise ValueError(
                f"expected a shard from 1/{self.count} to {self.count}/{self.count}, "
                f"and at most {SHARDS_MAX} shards, got {self}"
            )

    @classmethod
    def parse(cls, text: str) -> Shard:
        """The reverse of ``str``: ``3/8`` is the third of eight. Raises ValueError."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"expected a shard such as 3/8, the third of eight, got {text[:60]!r}")
        return cls(int(found[1]), int(found[2]))

    @property
    def whole(self) -> bool:
        """Whether it is all there is."""
        return self.count == 1

    @property
    def first(self) -> int:
        """Its lowest partition, where records about all of the shard are."""
        return self.number - 1

    def of(self, partitions: Iterable[int]) -> list[int]:
        """Those of the partitions that are the shard's."""
        return [partition for partition in partitions if partition % self.count == self.number - 1]

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


WHOLE = Shard(1, 1)
"""An app that runs without shards."""
