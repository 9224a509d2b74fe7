"""The ledger: one record per attempt, so that an app's promises can be checked against what it did.

A record is a line of the JSON below; its key is the message's. All records of a lane are in the same partition of the
ledger.

====== ==========================================================================================================
``t``  the source, and ``i`` Kafka's id of it; ``p`` the message's partition there, ``o`` its offset
``a``  the number of the attempt, over all stages; 0 if it was done without one: skipped, parked, a duplicate
``w``  who ran it: host, process and task; ``l``: a number that changes when this owner begins again
``s``  when it started, ``e`` when it ended: microseconds since 1970 by the owner's clock, which never goes back
``r``  how it ended: ``ok``, ``ignored``, ``dead``, ``skipped``, ``parked``, ``duplicate``, ``stale``: finished;
       ``retry``, ``held``: not yet
``d``  1 if it came from the dead letters; left out otherwise
``m``  the share of the keys that is recorded, if it is not all
====== ==========================================================================================================
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any

from keylane.errors import SettingsError
from keylane.outcome import Outcome

FINAL = tuple(outcome.value for outcome in Outcome)
"""After one of these the message is finished and its lane may continue."""
_PARTS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Makes an app keep a ledger of a ``share`` of its keys, each with all its messages; keyless messages likewise.

    Raises :class:`SettingsError` for an invalid share.
    """

    share: float = 1.0

    def __post_init__(self) -> None:
        if type(self.share) not in (int, float) or not 0 < self.share <= 1:
            raise SettingsError(f"Ledger(share={self.share!r}): expected a number above 0, and 1 at most")

    @property
    def below(self) -> int:
        """The value that :func:`slot` must be below."""
        return round(self.share * _PARTS)

    def records(self, key: bytes | None, offset: int) -> bool:
        """True if this message is recorded."""
        return self.share == 1 or slot(key, offset) < self.below


def slot(key: bytes | None, offset: int) -> int:
    """The slot of a key, as computed by :data:`SLOT_SQL`; of a message without a key, by its offset."""
    return zlib.crc32(str(offset).encode() if key is None else key) % _PARTS


SLOT_SQL = f"crc32(coalesce(key, cast(cast(offset AS string) AS binary))) % {_PARTS}"


def encode(
    *,
    topic: str,
    source_id: str,
    partition: int,
    offset: int,
    attempt: int,
    owner: str,
    life: str,
    started: int,
    ended: int,
    outcome: str,
    redriven: bool,
    share: float,
) -> bytes:
    """A record's value."""
    found: dict[str, Any] = {
        "t": topic, "i": source_id, "p": partition, "o": offset, "a": attempt, "w": owner, "l": life, "s": started,
        "e": ended, "r": outcome,
    }  # fmt: skip
    if redriven:
        found["d"] = 1
    if share < 1:
        found["m"] = share
    return json.dumps(found, separators=(",", ":")).encode()
