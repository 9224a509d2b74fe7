"""One Cassandra node, which the prosody peer does not start without. It sleeps while others are measured."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from typing import TYPE_CHECKING, Self

from bench.build import PEERS
from bench.errors import BenchError
from bench.process import Process
from keylane.broker import find_java

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

_START_SECONDS_MAX = 120.0
_EXPORTS = (
    "java.base/java.lang.ref java.base/jdk.internal.misc java.rmi/sun.rmi.registry java.rmi/sun.rmi.server "
    "java.rmi/sun.rmi.transport.tcp java.sql/java.sql jdk.unsupported/sun.misc"
)
_OPENS = (
    "java.base/java.io java.base/java.lang java.base/java.lang.module java.base/java.lang.reflect java.base/java.net "
    "java.base/java.nio java.base/java.util java.base/java.util.concurrent java.base/java.util.concurrent.atomic "
    "java.base/jdk.internal.loader java.base/jdk.internal.math java.base/jdk.internal.module "
    "java.base/jdk.internal.ref java.base/jdk.internal.reflect java.base/jdk.internal.util.jar java.base/sun.nio.ch "
    "jdk.management/com.sun.management.internal"
)
_YAML = """
cluster_name: bench
num_tokens: 1
auto_bootstrap: false
partitioner: org.apache.cassandra.dht.Murmur3Partitioner
commitlog_sync: periodic
commitlog_sync_period: 10000ms
endpoint_snitch: SimpleSnitch
listen_address: 127.0.0.1
rpc_address: 127.0.0.1
storage_port: {storage}
native_transport_port: {native}
seed_provider:
  - class_name: org.apache.cassandra.locator.SimpleSeedProvider
    parameters:
      - seeds: "127.0.0.1:{storage}"
data_file_directories: ["{folder}/data"]
commitlog_directory: "{folder}/commitlog"
saved_caches_directory: "{folder}/saved_caches"
hints_directory: "{folder}/hints"
"""


class Cassandra:
    """A context manager. ``address`` answers inside; the node sleeps until :meth:`awake`."""

    def __init__(self, built: Path, folder: Path) -> None:
        storage, native = _free_ports()
        self.address = f"127.0.0.1:{native}"
        self._port = native
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "cassandra.yaml"
        config.write_text(_YAML.format(storage=storage, native=native, folder=folder))
        agent = next((built / "libs").glob("jamm-*.jar"), None)
        if agent is None:
            raise BenchError(f"{built / 'libs'} has no Cassandra in it")
        self._process = Process(
            [
                *(
                    str(find_java()),
                    "-Xms1g",
                    "-Xmx2g",
                    f"-javaagent:{agent}",
                    "-Djdk.attach.allowAttachSelf=true",
                ),
                *(part for name in _EXPORTS.split() for part in ("--add-exports", f"{name}=ALL-UNNAMED")),
                *(part for name in _OPENS.split() for part in ("--add-opens", f"{name}=ALL-UNNAMED")),
                *(f"-Dcassandra.config=file://{config}", f"-Dcassandra.storagedir={folder}"),
                *("-Dcassandra-foreground=yes", "-Dcassandra.ring_delay_ms=100"),
                "-Dcassandra.skip_wait_for_gossip_to_settle=0",
                f"-Dlogback.configurationFile=file://{PEERS / 'cassandra' / 'logback.xml'}",
                *("-cp", f"{built / 'libs'}/*", "org.apache.cassandra.service.CassandraDaemon"),
            ],
            folder / "cassandra.log",
        )

    def __enter__(self) -> Self:
        self._process.__enter__()
        try:
            self._wait()
        except BaseException:
            self._process.stop(grace=5)
            raise
        self._process.signal(signal.SIGSTOP)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.signal(signal.SIGCONT)
        self._process.stop(grace=10)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """It answers inside, and takes no processor time outside."""
        self._process.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._process.signal(signal.SIGSTOP)

    def _wait(self) -> None:
        until = time.monotonic() + _START_SECONDS_MAX
        while time.monotonic() < until:
            self._process.must_run()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
                return
            time.sleep(0.2)
        raise BenchError(
            f"Cassandra did not answer within {_START_SECONDS_MAX:.0f} s; {self._process.last_words()}"
        )


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1]), int(other.getsockname()[1])
