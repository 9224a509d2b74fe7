"""What runs share: brokers, their proxies, and driver processes. Made when first needed, ended together."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from campaign.handle import Driver
from campaign.proxy import Proxy
from keylane.broker import Broker
from support.topics import Log

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

LOCAL = "local[2]"
CLUSTER = "local-cluster[2,1,1024]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """A broker, a way to it that can be harmed, and one that cannot."""

    broker: Broker
    proxy: Proxy
    log: Log


class Fleet:
    """Used as a context manager; `folder` holds the runs and the drivers' logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stations: dict[int, Station] = {}
        self._drivers: dict[bool, Driver] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reset()
        self._stack.close()

    def station(self, nodes: int) -> Station:
        """A broker with this many nodes, all of them up."""
        if nodes not in self._stations:
            # Short sessions: a node that was killed is taken for dead soon, and its partitions get another leader.
            settings = {"broker.session.timeout.ms": 3000, "broker.heartbeat.interval.ms": 500}
            broker = self._stack.enter_context(Broker(nodes=nodes, heap="384m", settings=settings))
            proxy = self._stack.enter_context(Proxy([node.port for node in broker.nodes]))
            self._stations[nodes] = Station(broker=broker, proxy=proxy, log=Log(broker.bootstrap))
        station = self._stations[nodes]
        for node in station.broker.nodes:
            if not node.alive:
                node.start()
        return station

    def driver(self, *, cluster: bool) -> Driver:
        """The driver process of this kind; it starts on first use."""
        if cluster not in self._drivers:
            master = CLUSTER if cluster else LOCAL
            log = self.folder / f"driver-{'cluster' if cluster else 'local'}.log"
            self._drivers[cluster] = Driver(master, log)
        return self._drivers[cluster]

    def reset(self) -> None:
        """End the drivers; the next run gets new ones."""
        for driver in self._drivers.values():
            driver.close()
