from __future__ import annotations

import socket
import struct

from campaign.proxy import HOST, Proxy


def test_late_request_to_a_dead_broker_is_lost() -> None:
    with socket.socket() as gone:
        gone.bind((HOST, 0))
        port = gone.getsockname()[1]
    with Proxy([port]) as proxy:
        proxy._late[b"app.1"] = (port, struct.pack(">hhi", 26, 1, 7))
        assert proxy.deliver_late() == {"app.1": -1}
        assert proxy.late == 0
