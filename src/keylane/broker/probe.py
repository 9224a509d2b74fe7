"""Probe of a node: which nodes it knows to be up."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

from keylane.broker.ports import HOST
from keylane.kafka.client import AdminClient, KafkaException

if TYPE_CHECKING:
    from collections.abc import Mapping

# librdkafka logs errors about a broker that is still starting; they are not useful here.
_QUIET = logging.getLogger("keylane.broker.probe")
_QUIET.addHandler(logging.NullHandler())
_QUIET.propagate = False


class Probe:
    """Repeated questions to one node. The first answer always comes from that node itself.

    `security`: the client settings for a secured node.
    """

    __slots__ = ("_client", "_port", "_security")

    def __init__(self, port: int, security: Mapping[str, str] | None = None) -> None:
        self._port = port
        self._security = dict(security or {})
        self._client: AdminClient | None = None

    def members(self, timeout: float) -> frozenset[int]:
        """The numbers of the nodes that this node knows to be up; empty if it does not answer in time.

        Kafka answers only after the node has registered, so an answer means that it is ready.
        """
        if self._client is None:
            if not self._listens(timeout):
                return frozenset()
            self._client = AdminClient(
                {
                    **self._security,
                    "bootstrap.servers": f"{HOST}:{self._port}",
                    "reconnect.backoff.ms": 20,
                    "reconnect.backoff.max.ms": 200,
                    "log_level": 0,
                },
                logger=_QUIET,
            )
        try:
            return frozenset(int(number) for number in self._client.list_topics(timeout=timeout).brokers)
        except KafkaException:
            return frozenset()

    def _listens(self, timeout: float) -> bool:
        try:
            with socket.create_connection((HOST, self._port), timeout=timeout):
                return True
        except OSError:
            return False
