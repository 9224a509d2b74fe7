"""Shards of the partitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.offsets.murmur2 import partition_of
from keylane.offsets.shard import WHOLE, Shard


@given(count=st.integers(1, 40), partitions=st.integers(1, 200))
def test_every_partition_is_in_one_shard(count: int, partitions: int) -> None:
    shards = [Shard(number, count).of(range(partitions)) for number in range(1, count + 1)]
    assert sorted(partition for shard in shards for partition in shard) == list(range(partitions))
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


@given(
    count=st.integers(1, 12), before=st.integers(1, 12), more=st.integers(1, 12), key=st.binary(max_size=30)
)
def test_moved_key_stays_in_a_shard_that_fits(count: int, before: int, more: int, key: bytes) -> None:
    """If the number of shards divides the number of partitions before and after."""
    home = partition_of(key, before * count)
    moved = partition_of(key, (before + more) * count)
    assert home % count == moved % count


def test_shard_is_read_from_its_text() -> None:
    assert Shard.parse("3/8") == Shard(3, 8)
    assert str(Shard(3, 8)) == "3/8"
    assert Shard.parse("1/1") == WHOLE
    assert WHOLE.whole
    assert not Shard(1, 2).whole
    assert Shard(3, 8).first == 2
    assert Shard(3, 8).of(range(20)) == [2, 10, 18]


@pytest.mark.parametrize(
    "text", ["", "3", "0/8", "9/8", "3/0", "-1/2", "3/8/9", " 3/8", "3/99999", "a/b", "1/1000000"]
)
def test_shard_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a shard"):
        Shard.parse(text)
