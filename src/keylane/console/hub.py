"""All apps of a broker, discovered by their topics and watched once, however many browsers look."""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from keylane.console.watch import AppWatch
from keylane.errors import BrokerError
from keylane.kafka.cluster import Cluster
from keylane.topic_names import dead_letter_topic, state_topic

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from keylane.kafka.settings import KafkaSettings

log = logging.getLogger("keylane.console")

APPS_MAX = 50
"""Apps that are watched; each costs three clients. Others are listed, and can be named on the command line."""
_DISCOVERY_SECONDS = 5.0


class UnknownAppError(BrokerError):
    """No app of this name is watched."""


def apps_of(topics: Collection[str]) -> list[str]:
    """The apps that own topics of these names: an app has a state topic and a dead-letter topic."""
    endings = state_topic(""), dead_letter_topic("")
    names = {topic.removesuffix(endings[0]) for topic in topics if topic.endswith(endings[0])}
    return sorted(name for name in names if name and dead_letter_topic(name) in topics)


class Hub:
    """Discovers and watches apps in threads of its own, until closed. Other threads may call everything here."""

    def __init__(self, settings: KafkaSettings, names: Sequence[str] = ()) -> None:
        self.settings = settings
        self.error: str | None = None
        """Why the broker could not be asked for its topics; None if it answered."""
        self.left_out: Sequence[str] = ()
        self._names = tuple(names)
        self._watches: dict[str, AppWatch] = {}
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._overview: tuple[object, bytes] = (None, b"")
        self._thread = threading.Thread(target=self._discover, name="keylane-console-apps", daemon=True)

    def start(self) -> None:
        """Start to look for apps."""
        self._thread.start()

    def close(self) -> None:
        """End all threads."""
        self._closing.set()
        self._thread.join(5)
        for watch in list(self._watches.values()):
            watch.close()

    def watch(self, app: str) -> AppWatch:
        """The watch of this app. Raises UnknownAppError."""
        watch = self._watches.get(app)
        if watch is None:
            raise UnknownAppError(f"no app {app[:100]!r} is watched at {self.settings.bootstrap}")
        return watch

    def overview(self) -> bytes:
        """All apps as JSON. It is made once for all browsers."""
        watches = [watch for _, watch in sorted(self._watches.items())]
        version = ([(watch.app, watch.reading.version) for watch in watches], self.error)
        with self._lock:
            if self._overview[0] != version:
                facts: Mapping[str, Any] = {
                    "at": time.time(),
                    "error": self.error,
                    "left_out": list(self.left_out),
                    "apps": [watch.reading.facts for watch in watches],
                }
                self._overview = version, json.dumps(facts).encode()
            return self._overview[1]

    def _discover(self) -> None:
        cluster: Cluster | None = None
        while not self._closing.is_set():
            try:
                cluster = cluster or Cluster(self.settings)
                known = cluster.topics()
                self.error = None
            except BrokerError as error:
                if self.error is None:
                    log.warning("could not list topics, retrying: %s", error)
                self.error = str(error)
            else:
                found = list(self._names) or apps_of(known)
                self.left_out = found[APPS_MAX:]
                for name in found[:APPS_MAX]:
                    if name not in self._watches:
                        watch = AppWatch(self.settings, name)
                        self._watches = {**self._watches, name: watch}
                        watch.start()
                for name in [name for name in self._watches if name not in found]:
                    gone = self._watches[name]
                    self._watches = {key: watch for key, watch in self._watches.items() if key != name}
                    gone.close()
            self._closing.wait(_DISCOVERY_SECONDS)
