from __future__ import annotations

import socket

import pytest

from keylane.broker import EmbeddedBrokerError, PortTakenError
from keylane.broker.ports import free_ports, require_free

pytestmark = pytest.mark.timeout(20)


def test_free_ports_are_different_and_free() -> None:
    ports = free_ports(6)
    assert len(set(ports)) == 6
    for port in ports:
        require_free(port)


def test_free_ports_are_below_those_of_outgoing_connections() -> None:
    assert all(port < 32_768 for port in free_ports(20))


def test_taken_port_is_named() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"port {port} on 127.0.0.1 is taken") as caught:
            require_free(port)
    assert caught.value.port == port


def test_port_taken_on_all_addresses_is_taken() -> None:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))  # noqa: S104 - that is the case
        holder.listen()
        with pytest.raises(PortTakenError):
            require_free(holder.getsockname()[1])


@pytest.mark.parametrize("port", [0, -1, 65_536])
def test_number_that_is_not_a_port_is_refused(port: int) -> None:
    with pytest.raises(EmbeddedBrokerError, match="expected a port from 1 to 65535"):
        require_free(port)
