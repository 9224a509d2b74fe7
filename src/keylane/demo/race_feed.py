"""The race for a browser: what has finished since it last asked, and whether it wants another round."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from keylane.demo.race import TITLES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from keylane.demo.race import Track

FINISHES_MAX = 2000
"""Finished messages in one answer."""


class RaceFeed:
    """Shared by the race, which sets the tracks, and the web server, which reads them."""

    def __init__(self, messages: int, keys: int, work_ms: float) -> None:
        self._facts = {"messages": messages, "keys": keys, "work_ms": work_ms}
        self._tracks: Sequence[Track] = ()
        self._round = 0
        self._wanted = threading.Event()

    def begin(self, tracks: Sequence[Track]) -> None:
        """A round with these tracks begins."""
        self._wanted.clear()
        self._tracks = tracks
        self._round += 1

    def wait(self, seconds: float) -> bool:
        """Wait until a browser wants a round; False if none did in this time."""
        return self._wanted.wait(seconds)

    def start(self) -> None:
        """A browser wants a round. Does nothing while one runs."""
        if all(track.done >= track.messages for track in self._tracks):
            self._wanted.set()

    def read(self, given: Mapping[str, str]) -> dict[str, Any]:
        """What has finished after the first ``given[order]`` messages of the round ``given["round"]``."""
        same = given.get("round") == str(self._round)
        return {
            **self._facts,
            "now": time.time(),
            "round": self._round,
            "waiting": self._wanted.is_set(),
            "tracks": [
                _facts(track, _count(given.get(track.order, "0")) if same else 0) for track in self._tracks
            ],
        }


def _count(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _facts(track: Track, known: int) -> dict[str, Any]:
    fresh = track.finishes[known : known + FINISHES_MAX]
    return {
        "order": track.order,
        "title": TITLES[track.order],
        "from": known,
        "done": track.done,
        "messages": track.messages,
        "per_second": round(track.per_second, 1),
        "seconds": round(track.seconds, 2),
        "overtaken": track.overtaken,
        "overtaken_in_key": track.overtaken_in_key,
        "sound": track.sound if track.done >= track.messages else None,
        "finishes": [
            [one.number, one.key, int(one.late), round(one.started, 4), round(one.finished, 4)]
            for one in fresh
        ],
    }
