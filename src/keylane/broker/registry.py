"""The brokers this user has started: one small file each, so that another command can find and stop them."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs

from keylane.broker.config import Address
from keylane.broker.process import Process

_LOG = logging.getLogger("keylane.broker")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node: where it listens and, once it was started, the process that it is or was."""

    address: Address
    process: Process | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRecord:
    """A broker. `owner` is the process it must not outlive; None if it runs until it is stopped.

    `command_folder` is where `keylane broker start` was called; None if a program started it.
    """

    id: str
    data: Path
    temporary: bool
    keep: bool
    heap: str
    settings: dict[str, str]
    started: float
    owner: Process | None
    nodes: tuple[NodeRecord, ...]
    command_folder: str | None = None

    @property
    def alive(self) -> bool:
        """Whether at least one node runs."""
        return any(node.process is not None and node.process.alive for node in self.nodes)

    @property
    def abandoned(self) -> bool:
        """Whether its owner is gone, and no node runs."""
        return self.owner is not None and not self.owner.alive and not self.alive

    def with_process(self, number: int, process: Process) -> BrokerRecord:
        """The same with another process for one node."""
        nodes = (
            replace(node, process=process) if node.address.node == number else node for node in self.nodes
        )
        return replace(self, nodes=tuple(nodes))


def folder() -> Path:
    """Where the files are: below KEYLANE_STATE, or this user's state folder."""
    root = os.environ.get("KEYLANE_STATE") or platformdirs.user_state_dir("keylane")
    return Path(root).absolute() / "brokers"


def path(broker: str) -> Path:
    """The file of one broker."""
    return folder() / f"{broker}.json"


def save(record: BrokerRecord) -> None:
    """Writes a broker's file, whole or not at all."""
    target = path(record.id)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(
        json.dumps({**asdict(record), "data": str(record.data)}, indent=1) + "\n", encoding="utf-8"
    )
    partial.replace(target)


def load(broker: str) -> BrokerRecord | None:
    """A broker's record; None if there is none by that id, or if its file cannot be read (which is logged)."""
    try:
        return _parse(json.loads(path(broker).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as cause:
        _LOG.warning("%s is damaged and left aside: %r", path(broker), cause)
        return None


def load_all() -> tuple[BrokerRecord, ...]:
    """All records, oldest first."""
    found = (load(file.stem) for file in folder().glob("*.json"))
    return tuple(
        sorted((record for record in found if record is not None), key=lambda record: record.started)
    )


def remove(broker: str) -> None:
    """Forgets a broker; no harm if it was not known."""
    path(broker).unlink(missing_ok=True)


def _parse(raw: dict[str, Any]) -> BrokerRecord:
    return BrokerRecord(
        id=raw["id"],
        data=Path(raw["data"]),
        temporary=raw["temporary"],
        keep=raw["keep"],
        heap=raw["heap"],
        settings=raw["settings"],
        started=raw["started"],
        owner=_process(raw["owner"]),
        nodes=tuple(
            NodeRecord(address=Address(**node["address"]), process=_process(node["process"]))
            for node in raw["nodes"]
        ),
        command_folder=raw.get("command_folder"),
    )


def _process(raw: dict[str, Any] | None) -> Process | None:
    return None if raw is None else Process(**raw)
