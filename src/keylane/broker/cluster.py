"""Cluster of real Kafka nodes on this machine, for tests, demos and development."""

from __future__ import annotations

import atexit
import os
import random
import subprocess
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Self

from keylane.broker import config, folder, ports, registry
from keylane.broker.access import ADMIN_USER, BROKER_USER, BrokerAccess
from keylane.broker.certificates import CertificateAuthority
from keylane.broker.errors import EmbeddedBrokerError, PortTakenError
from keylane.broker.kit import Kit, ensure_kit
from keylane.broker.node import Node
from keylane.broker.probe import Probe
from keylane.broker.process import Process, launch
from keylane.broker.progress import OnProgress, silent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

START_TIMEOUT_SECONDS = 60.0
STOP_TIMEOUT_SECONDS = 15.0
_PORT_ATTEMPTS = 3
_MAX_NODES = 9


class BrokerState(StrEnum):
    """Whether a broker's nodes run."""

    RUNNING = "running"
    DEGRADED = "degraded"  # some nodes run, others do not
    DEAD = "dead"


class Broker:
    """A cluster of real Kafka nodes in KRaft mode on loopback; each node is broker and controller.

    Use it as a context manager, or with `start` and `stop`. Unless `detached`, it never outlives the process that
    started it, even if that process is killed.

    `nodes`: the number of nodes; by default that of the data folder, or 1.
    `data`: a folder for the data, with the topics of an earlier broker on it; by default a temporary folder.
    `keep`: whether the data stays after the stop; by default only if `data` was given.
    `port`: the first node's port, followed by those of the other nodes; by default any free ports.
    `heap`: Java's heap of each node.
    `settings`: entries of Kafka's server.properties, which win over the defaults here.
    `secure`: TLS, a password or certificate for each client, and no rights but those that a rule gives; see `access`.
    `detached`: keep running until `stop` is called, by this or another process.
    `command_folder`: the folder of the command that started it; `keylane broker stop` there needs no id.
    `progress`: called with the progress of fetching Kafka, which happens once per machine.

    Raises EmbeddedBrokerError for arguments that cannot work.
    """

    def __init__(
        self,
        *,
        nodes: int | None = None,
        data: Path | str | None = None,
        keep: bool | None = None,
        port: int | None = None,
        heap: str = config.HEAP,
        settings: Mapping[str, config.Setting] | None = None,
        secure: bool = False,
        detached: bool = False,
        command_folder: Path | None = None,
        progress: OnProgress = silent,
    ) -> None:
        if nodes is not None and not 1 <= nodes <= _MAX_NODES:
            raise EmbeddedBrokerError(f"expected 1 to {_MAX_NODES} nodes, got {nodes}")
        config.heap_flags(heap)
        probe = config.Address(node=1, port=1, controller_port=2)
        properties = config.server_properties(probe, [probe], settings or {})
        self._count = nodes
        self._data = None if data is None else Path(data).expanduser().absolute()
        self._temporary = data is None
        self._keep = (data is not None) if keep is None else keep
        self._port = port
        self._heap = heap
        self._settings = {name: properties[name] for name in settings or {}}
        self._secure = secure
        self._detached = detached
        self._command_folder = None if command_folder is None else str(command_folder.absolute())
        self._progress = progress
        self._kit: Kit | None = None
        # Written by start, and by find for a broker of another process.
        self._record: registry.BrokerRecord | None = None
        self._nodes: tuple[Node, ...] = ()
        self._access: BrokerAccess | None = None

    @classmethod
    def find(cls, broker: str) -> Broker:
        """The broker of this user with this id, running or dead. Raises EmbeddedBrokerError if it does not exist."""
        record = registry.load(broker)
        if record is None:
            known = ", ".join(each.id for each in cls.list()) or "none"
            raise EmbeddedBrokerError(
                f"broker {broker!r} does not exist (known: {known}); `keylane broker status` lists all brokers"
            )
        return cls._attach(record)

    @classmethod
    def list(cls) -> tuple[Broker, ...]:
        """All brokers of this user, oldest first, including dead ones. Removes leftovers of killed programs."""
        _sweep()
        return tuple(cls._attach(record) for record in registry.load_all())

    @classmethod
    def _attach(cls, record: registry.BrokerRecord) -> Broker:
        found = cls(
            nodes=len(record.nodes),
            data=record.data,
            keep=record.keep,
            heap=record.heap,
            settings=record.settings,
            secure=record.secure,
        )
        found._temporary = record.temporary
        found._detached = record.owner is None
        found._adopt(record)
        return found

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return "<Broker not started>" if self._record is None else f"<Broker {self.id} at {self.bootstrap}>"

    @property
    def id(self) -> str:
        """A short name for this broker, such as "k7f3q2"."""
        return self._started().id

    @property
    def bootstrap(self) -> str:
        """The address for clients, such as "127.0.0.1:54321", with a comma between nodes."""
        return config.bootstrap([node.address for node in self._started().nodes])

    @property
    def secure(self) -> bool:
        """Whether clients need a user, and rights."""
        return self._secure

    @property
    def access(self) -> BrokerAccess:
        """Users and rights. Raises EmbeddedBrokerError if the broker is not secured."""
        record = self._started()
        if not self._secure:
            raise EmbeddedBrokerError(
                f"broker {record.id} has no users: start one with Broker(secure=True) or `keylane broker start "
                "--secure`"
            )
        if self._access is None:
            authority = CertificateAuthority(record.data / folder.SECURITY)
            addresses = [node.address for node in record.nodes]
            self._access = BrokerAccess(
                authority, config.bootstrap(addresses), config.certificate_bootstrap(addresses)
            )
        return self._access

    @property
    def admin_file(self) -> Path:
        """Client settings of the user `admin`, who may do everything. Raises EmbeddedBrokerError if not secured."""
        return self.access.file(ADMIN_USER)

    @property
    def data(self) -> Path:
        """The data folder."""
        return self._started().data

    @property
    def keep(self) -> bool:
        """Whether the data stays after the stop."""
        return self._started().keep

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, in order of their ids."""
        self._started()
        return self._nodes

    @property
    def owner(self) -> int | None:
        """The id of the process that it must not outlive; None if it is detached."""
        owner = self._started().owner
        return None if owner is None else owner.pid

    @property
    def command_folder(self) -> str | None:
        """The folder in which `keylane broker start` was called; None if a program started it."""
        return self._started().command_folder

    @property
    def uptime(self) -> float:
        """Seconds since the start."""
        return max(0.0, time.time() - self._started().started)

    @property
    def state(self) -> BrokerState:
        """Whether all, some or none of its nodes run."""
        running = sum(node.alive for node in self.nodes)
        if running == 0:
            return BrokerState.DEAD
        return BrokerState.RUNNING if running == len(self._nodes) else BrokerState.DEGRADED

    def size(self) -> int:
        """Bytes of data on disk."""
        return folder.size(self.data)

    def start(self, timeout: float = START_TIMEOUT_SECONDS) -> Self:
        """Start all nodes, and return when each of them serves and knows the others.

        Raises JavaError without a suitable Java, PortTakenError if the given port is taken, and EmbeddedBrokerError
        with Kafka's last log lines if a node is not ready within `timeout` seconds. After an error nothing is left
        running.
        """
        if self._record is not None:
            raise EmbeddedBrokerError(f"broker {self.id} is already started: stop it first")
        self._kit = ensure_kit(self._progress)
        _sweep()
        self._require_unused()
        broker = _new_id()
        place = folder.open_folder(self._data, broker=broker, nodes=self._count)
        try:
            self._start_on(place, broker, timeout)
        except BaseException:
            self._end(keep=True)
            if place.fresh:
                folder.discard(place.path)
            raise
        if not self._detached:
            atexit.register(self._at_exit)
        return self

    def stop(self, *, keep: bool | None = None) -> None:
        """Stop all nodes and delete the data, unless it is kept. Does nothing if the broker is not started.

        Nodes whose data is kept are shut down in order; the others are killed, which is quicker. `keep` overrides the
        choice made at the start.
        """
        record = self._record
        if record is None:
            return
        keep = record.keep if keep is None else keep
        if keep:
            for node in self._nodes:
                node.ask_to_stop()
            # The last nodes would wait for a quorum that cannot come, so they are killed. Kafka recovers from that.
            until = time.monotonic() + STOP_TIMEOUT_SECONDS
            for node in self._nodes:
                node.wait(until - time.monotonic())
        self._end(keep=keep)
        self._data = record.data if keep or not self._temporary else None
        atexit.unregister(self._at_exit)

    def tool(self, class_name: str, *args: str, timeout: float = 60.0) -> str:
        """Run one of Kafka's command-line tools by its class name, and return its output.

        For example `tool("org.apache.kafka.tools.consumer.group.ConsumerGroupCommand", "--bootstrap-server",
        broker.bootstrap, "--describe", "--all-groups")`. Raises EmbeddedBrokerError if it fails or takes too long.
        """
        command = self._tools().tool_command(class_name, args)
        try:
            answer = subprocess.run(  # noqa: S603 - our own command line
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as cause:
            raise EmbeddedBrokerError(f"{class_name} did not finish in {timeout:.0f} s") from cause
        if answer.returncode != 0:
            output = (answer.stdout + answer.stderr).strip()
            raise EmbeddedBrokerError(f"{class_name} failed with exit code {answer.returncode}:\n{output}")
        return answer.stdout

    # For nodes: see `keylane.broker.node.Host`.

    def process(self, number: int) -> Process | None:
        """The current or last process of a node; None if it was never started."""
        return self._started().nodes[number - 1].process

    def launch(self, node: Node) -> None:
        """Start the process of a node, without waiting until it serves."""
        record = self._started()
        node.mark_log()
        # Removed when the owner is killed: the registry's entry and, unless it is kept, the data.
        doomed = [registry.path(record.id)]
        if not record.keep:
            doomed += [record.data] if record.temporary else folder.contents(record.data)
        command = self._tools().node_command(record.heap)
        process = launch(command, cwd=node.folder, console=config.CONSOLE, owner=record.owner, remove=doomed)
        self._record = record.with_process(node.id, process)
        _save(self._record)

    def wait_ready(self, nodes: tuple[Node, ...], *, wanted: frozenset[int], timeout: float) -> None:
        """Wait until each of these nodes serves and knows the `wanted` ones. Raises EmbeddedBrokerError otherwise."""
        until = time.monotonic() + timeout
        waiting = {node: self._probe(node) for node in nodes}
        while True:
            for node in nodes:
                if not node.alive:
                    raise node.failure("ended while it was starting")
            for node, probe in tuple(waiting.items()):
                if wanted <= probe.members(0.5):
                    del waiting[node]
            if not waiting:
                return
            if time.monotonic() > until:
                raise next(iter(waiting)).failure(f"was not ready after {timeout:.0f} s")
            time.sleep(0.03)

    def _probe(self, node: Node) -> Probe:
        if not self._secure:
            return Probe(node.port)
        return Probe(node.address.certificate_port, dict(self.access.own_settings.extra))

    def _start_on(self, place: folder.DataFolder, broker: str, timeout: float) -> None:
        asked = () if self._port is None else tuple(range(self._port, self._port + place.nodes))
        if not self._secure and (place.path / folder.SECURITY).exists():
            raise EmbeddedBrokerError(
                f"{place.path} has the data of a secured broker: start it with `--secure` (`secure=True`)"
            )
        for left in reversed(range(_PORT_ATTEMPTS)):
            addresses = _addresses(place.nodes, asked, secure=self._secure)
            self._adopt(
                registry.BrokerRecord(
                    id=broker,
                    data=place.path,
                    temporary=self._temporary,
                    keep=self._keep,
                    heap=self._heap,
                    settings=self._settings,
                    started=time.time(),
                    owner=None if self._detached else Process.current(),
                    nodes=tuple(registry.NodeRecord(address=each, process=None) for each in addresses),
                    command_folder=self._command_folder,
                    secure=self._secure,
                )
            )
            try:
                self._start_nodes(place, addresses, timeout)
            except PortTakenError as error:
                if error.port in asked:
                    raise ports.taken(int(error.port or 0)) from error
                if not left:
                    raise
                self._kill()
            else:
                return

    def _start_nodes(
        self, place: folder.DataFolder, addresses: Sequence[config.Address], timeout: float
    ) -> None:
        tls = self._tls_files(place.path / folder.SECURITY) if self._secure else None
        for node in self._nodes:
            config.write_node(
                node.folder, config.server_properties(node.address, addresses, self._settings, tls)
            )
            config.format_storage(
                node.folder, node=node.id, cluster=place.cluster, checkpoint=self._tools().checkpoint
            )
        for node in self._nodes:
            self.launch(node)
        self.wait_ready(self._nodes, wanted=frozenset(node.id for node in self._nodes), timeout=timeout)
        if self._secure and not self.admin_file.exists():
            self.access.add_user(ADMIN_USER)

    @staticmethod
    def _tls_files(place: Path) -> config.TlsFiles:
        authority = CertificateAuthority(place)
        store = place / f"{BROKER_USER}.p12"
        if not store.exists():
            authority.issue(BROKER_USER)
        return config.TlsFiles(store=store, password=authority.password, authority=authority.certificate)

    def _adopt(self, record: registry.BrokerRecord) -> None:
        self._record = record
        self._nodes = tuple(
            Node(self, each.address, folder.node_folder(record.data, each.address.node))
            for each in record.nodes
        )

    def _started(self) -> registry.BrokerRecord:
        if self._record is None:
            raise EmbeddedBrokerError(
                "the broker is not started: call start(), or use it in a with statement"
            )
        return self._record

    def _tools(self) -> Kit:
        if self._kit is None:
            self._kit = ensure_kit(self._progress)
        return self._kit

    def _require_unused(self) -> None:
        """Raise EmbeddedBrokerError if another broker of this user has the folder or the port."""
        for record in registry.load_all():
            if not record.alive:
                continue
            remedy = f"stop it (`keylane broker stop {record.id}`), or choose another"
            if self._data is not None and record.data == self._data:
                raise EmbeddedBrokerError(f"broker {record.id} runs on {self._data}: {remedy} folder")
            if self._port is not None and self._port in (node.address.port for node in record.nodes):
                raise PortTakenError(
                    f"port {self._port} is taken by broker {record.id}: {remedy} port", port=self._port
                )

    def _kill(self) -> None:
        for node in self._nodes:
            node.kill()

    def _end(self, *, keep: bool) -> None:
        """Kill the nodes that still run, and remove the broker from the registry."""
        record = self._record
        if record is None:
            return
        self._kill()
        if not keep:
            folder.discard(record.data)
        registry.remove(record.id)
        self._record = None
        self._nodes = ()
        self._access = None

    def _at_exit(self) -> None:
        # A forked child inherits the exit hooks, but does not own the broker.
        if self._record is not None and self.owner == os.getpid():
            self.stop()


def _addresses(count: int, asked: Sequence[int], *, secure: bool) -> tuple[config.Address, ...]:
    for port in asked:
        ports.require_free(port)
    chosen = [port for port in ports.free_ports(count * 3 + len(asked)) if port not in asked]
    clients = asked or chosen[count : count * 2]
    return tuple(
        config.Address(
            node=index + 1,
            port=clients[index],
            controller_port=chosen[index],
            certificate_port=chosen[count * 2 + index] if secure else 0,
        )
        for index in range(count)
    )


def _new_id() -> str:
    """A new short id that is easy to read out: without vowels and 0, 1, l, o."""
    while True:
        broker = "k" + "".join(random.choices("bcdfghjkmnpqrstvwxz23456789", k=5))
        if not registry.path(broker).exists():
            return broker


def _save(record: registry.BrokerRecord) -> None:
    try:
        registry.save(record)
    except OSError as cause:
        raise EmbeddedBrokerError(
            f"could not register the broker in {registry.folder()} ({cause.strerror or cause}): "
            "make the folder writable, or set KEYLANE_STATE to another one"
        ) from cause


def _sweep() -> None:
    """Remove leftovers of brokers whose owner was killed without a watcher to clean up."""
    for record in registry.load_all():
        if record.abandoned:
            if not record.keep:
                folder.discard(record.data)
            registry.remove(record.id)
