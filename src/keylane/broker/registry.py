"""Registry of this user's brokers: one small file each, so that other commands can find and stop them."""

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
    """A node: its address, and its current or last process; None if it was never started."""

    address: Address
    process: Process | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRecord:
    """A broker. `owner` is the process that it must not outlive; None if it is detached.

    `command_folder` is the folder in which `keylane broker start` was called; None if a program started it.
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
    secure: bool = False

    @property
    def alive(self) -> bool:
        """True while at least one node runs."""
        return any(node.process is not None and node.process.alive for node in self.nodes)

    @property
    def abandoned(self) -> bool:
        """True when its owner has ended and no node runs."""
        return self.owner is not None and not self.owner.alive and not self.alive

    def with_process(self, number: int, process: Process) -> BrokerRecord:
        """A copy with another process for one node."""
        nodes = (
            replace(node, process=process) if node.address.node == number else node for node in self.nodes
        )
        return replace(self, nodes=tuple(nodes))


def folder() -> Path:
    """The folder of the files: below KEYLANE_STATE, or in this user's state folder."""
    root = os.environ.get("KEYLANE_STATE") or platformdirs.user_state_dir("keylane")
    return Path(root).absolute() / "brokers"


def path(broker: str) -> Path:
    """The file of one broker."""
    return folder() / f"{broker}.json"


def save(record: BrokerRecord) -> None:
    """Write a broker's file atomically."""
    target = path(record.id)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(
        json.dumps({**asdict(record), "data": str(record.data)}, indent=1) + "\n", encoding="utf-8"
    )
    partial.replace(target)


def load(broker: str) -> BrokerRecord | None:
    """A broker's record; None if its file does not exist, or is damaged (which is logged)."""
    try:
        return _parse(json.loads(path(broker).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as cause:
        _LOG.warning("ignoring damaged broker file path=%s error=%r", path(broker), cause)
        return None


def load_all() -> tuple[BrokerRecord, ...]:
    """All records, oldest first."""
    found = (load(file.stem) for file in folder().glob("*.json"))
    return tuple(
        sorted((record for record in found if record is not None), key=lambda record: record.started)
    )


def remove(broker: str) -> None:
    """Remove a broker's file, if it exists."""
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
        secure=raw.get("secure", False),
    )


def _process(raw: dict[str, Any] | None) -> Process | None:
    return None if raw is None else Process(**raw)
