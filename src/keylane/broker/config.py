"""Configuration of a node: its server.properties, its logging and its Java flags."""

from __future__ import annotations

import base64
import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keylane.broker.errors import EmbeddedBrokerError
from keylane.broker.ports import HOST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Setting = str | int | float | bool

HEAP = "512m"
# Relative to the node's folder, which is the process's working folder, so that no path needs escaping.
PROPERTIES = "server.properties"
LOGGING = "log4j2.properties"
LOG = "server.log"
CONSOLE = "console.log"
DATA = "data"

_FIXED = re.compile(
    r"process\.roles|node\.id|broker\.id|listeners|advertised\.listeners|log\.dirs?|metadata\.log\.dir"
    r"|listener\.security\.protocol\.map|inter\.broker\.listener\.name|ssl\.(keystore|truststore)\..*|controller\.(listener\.names|quorum\.(voters|bootstrap\.servers))"
)
_HEAP = re.compile(r"(\d+)([mg])", re.IGNORECASE)
_LOG4J_PROPERTIES = f"""\
status = error
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {LOG}
appender.file.filePattern = {LOG}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d %-5p %c{{1}}: %m%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 10MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 2
rootLogger.level = info
rootLogger.appenderRef.file.ref = file
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A node's number (from 1) and its ports: for clients and other brokers, and for the controllers.

    A secured node has another one for clients with a certificate and for other brokers.
    """

    node: int
    port: int
    controller_port: int
    certificate_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """What a secured node needs: its key store, its password, and the certificate of the authority."""

    store: Path
    password: str
    authority: Path


def bootstrap(addresses: Sequence[Address]) -> str:
    """The address for clients."""
    return ",".join(f"{HOST}:{address.port}" for address in addresses)


def certificate_bootstrap(addresses: Sequence[Address]) -> str:
    """The address for clients with a certificate."""
    return ",".join(f"{HOST}:{address.certificate_port}" for address in addresses)


def server_properties(
    node: Address, cluster: Sequence[Address], settings: Mapping[str, Setting], tls: TlsFiles | None = None
) -> dict[str, str]:
    """The configuration of one node; `settings` win over the defaults here. `tls`: of a secured node.

    Raises EmbeddedBrokerError if `settings` has one that the embedded broker must decide, such as its listeners.
    """
    refused = sorted(name for name in settings if _FIXED.fullmatch(name))
    if refused:
        raise EmbeddedBrokerError(
            f"the embedded broker decides {', '.join(refused)} itself: leave it out of the settings"
        )
    replicas = min(3, len(cluster))
    in_sync = 2 if replicas == 3 else 1
    return {
        "process.roles": "broker,controller",
        "node.id": str(node.node),
        **(_plain_listeners(node) if tls is None else _secured_listeners(node, tls)),
        "controller.listener.names": "CONTROLLER",
        "controller.quorum.voters": ",".join(
            f"{each.node}@{HOST}:{each.controller_port}" for each in cluster
        ),
        "log.dirs": DATA,
        "auto.create.topics.enable": "false",
        "default.replication.factor": str(replicas),
        "min.insync.replicas": str(in_sync),
        # Few partitions for Kafka's own topics: each costs time when the first group or transaction appears.
        "offsets.topic.num.partitions": "4",
        "offsets.topic.replication.factor": str(replicas),
        "transaction.state.log.num.partitions": "4",
        "transaction.state.log.replication.factor": str(replicas),
        "transaction.state.log.min.isr": str(in_sync),
        "share.coordinator.state.topic.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": str(replicas),
        "share.coordinator.state.topic.min.isr": str(in_sync),
        "group.initial.rebalance.delay.ms": "0",
        # The default of 128 MB is a quarter of the heap.
        "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
        **{name: _text(value) for name, value in settings.items()},
    }


def _plain_listeners(node: Address) -> dict[str, str]:
    return {
        "listeners": f"PLAINTEXT://{HOST}:{node.port},CONTROLLER://{HOST}:{node.controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{node.port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    }


def _secured_listeners(node: Address, tls: TlsFiles) -> dict[str, str]:
    """TLS everywhere. Clients have a password (SCRAM) or a certificate; brokers and controllers have a certificate."""
    clients = f"SASL_SSL://{HOST}:{node.port},SSL://{HOST}:{node.certificate_port}"
    return {
        "listeners": f"{clients},CONTROLLER://{HOST}:{node.controller_port}",
        "advertised.listeners": clients,
        "listener.security.protocol.map": "SASL_SSL:SASL_SSL,SSL:SSL,CONTROLLER:SSL",
        "inter.broker.listener.name": "SSL",
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        ),
        "ssl.client.auth": "required",
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.location": str(tls.store),
        "ssl.keystore.password": tls.password,
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(tls.authority),
        "ssl.principal.mapping.rules": "RULE:^CN=([^,]+).*$/$1/",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "false",
        "super.users": "User:broker;User:admin",
    }


def heap_flags(heap: str) -> tuple[str, str]:
    """-Xmx and -Xms (half of it) for a heap such as "512m" or "2g"; raises EmbeddedBrokerError for anything else."""
    found = _HEAP.fullmatch(heap.strip())
    megabytes = int(found[1]) * (1024 if found[2] in "gG" else 1) if found else 0
    if megabytes < 128:
        raise EmbeddedBrokerError(f"expected a heap of at least 128m, such as 512m or 2g, got {heap!r}")
    return f"-Xmx{megabytes}m", f"-Xms{megabytes // 2}m"


def java_flags(heap: str, archive: Path | None) -> tuple[str, ...]:
    """The flags of a node's Java. `archive` is a class archive, which halves the start-up time."""
    return (
        *heap_flags(heap),
        # Faster than G1 on few cores with a small heap, and with shorter pauses.
        "-XX:+UseSerialGC",
        "-XX:-UsePerfData",
        "-XX:+ExitOnOutOfMemoryError",
        "-Xshare:auto",
        *(() if archive is None else (f"-XX:SharedArchiveFile={archive}",)),
        "-Djava.awt.headless=true",
        f"-Dlog4j2.configurationFile={LOGGING}",
    )


def write_node(folder: Path, properties: Mapping[str, str]) -> None:
    """Write the node's configuration files. They may have passwords in them."""
    path = folder / PROPERTIES
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(render(properties), encoding="ascii")
    (folder / LOGGING).write_text(_LOG4J_PROPERTIES, encoding="ascii")


def format_storage(folder: Path, *, node: int, cluster: str, checkpoint: Path) -> None:
    """Format the node's data folder as Kafka's `StorageTool format` does, unless it is formatted.

    `checkpoint` is a bootstrap.checkpoint that the tool wrote. It has feature levels and nothing of a cluster.
    """
    data = folder / DATA
    data.mkdir(parents=True, exist_ok=True)
    if (data / "meta.properties").exists():
        return
    (data / "bootstrap.checkpoint").write_bytes(checkpoint.read_bytes())
    meta = {"version": "1", "cluster.id": cluster, "node.id": str(node), "directory.id": new_uuid()}
    (data / "meta.properties").write_text(render(meta), encoding="ascii")


def new_uuid() -> str:
    """A random id in Kafka's format: 22 characters that do not begin with a dash."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        if not text.startswith("-"):
            return text


def render(properties: Mapping[str, str]) -> str:
    """Java's properties format."""
    return "".join(f"{_escape(name, '=: ')}={_escape(value, '')}\n" for name, value in properties.items())


def _escape(text: str, special: str) -> str:
    def one(position: int, character: str) -> str:
        if character in "\\\n\r\t" or not character.isascii() or not character.isprintable():
            return "".join(f"\\u{unit:04x}" for unit in _utf16(character))
        if character in special or (position == 0 and character in " #!"):
            return f"\\{character}"
        return character

    return "".join(one(position, character) for position, character in enumerate(text))


def _utf16(character: str) -> list[int]:
    raw = character.encode("utf-16-be", errors="surrogatepass")
    return [int.from_bytes(raw[at : at + 2], "big") for at in range(0, len(raw), 2)]


def _text(value: Setting) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
