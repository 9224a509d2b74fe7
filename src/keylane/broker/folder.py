"""Data folder of a broker: one sub-folder per node, and a marker file with the cluster's id."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from keylane.broker.config import new_uuid
from keylane.broker.errors import EmbeddedBrokerError

MARKER = "keylane-broker.json"
SECURITY = "security"
"""The folder with the keys and users' settings of a secured broker."""
MIN_FREE_BYTES = 200 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFolder:
    """A folder that is ready for a broker. `fresh`: it had no broker's data before."""

    path: Path
    cluster: str
    nodes: int
    fresh: bool

    def node(self, number: int) -> Path:
        """The folder of one node."""
        return node_folder(self.path, number)


def node_folder(data: Path, number: int) -> Path:
    """The folder of one node in a data folder."""
    return data / f"node-{number}"


def open_folder(path: Path | None, *, broker: str, nodes: int | None) -> DataFolder:
    """Open or create a data folder; without a path, a temporary one. `nodes` None: as many as it has, or 1.

    Raises EmbeddedBrokerError if the folder cannot be written, has less than 200 MB of free space, contains other
    files, or the data of a cluster with another number of nodes.
    """
    try:
        return _open(path, broker, nodes)
    except OSError as cause:
        place = path or tempfile.gettempdir()
        raise EmbeddedBrokerError(
            f"the broker cannot store its data in {place} ({cause.strerror or cause}): choose a writable folder"
        ) from cause


def _open(path: Path | None, broker: str, nodes: int | None) -> DataFolder:
    if path is None:
        made = True
        path = Path(tempfile.mkdtemp(prefix=f"keylane-broker-{broker}-"))
    else:
        made = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
    try:
        _require_space(path)
        known = _read_marker(path)
        if known is None:
            known = (new_uuid(), 1 if nodes is None else nodes)
            fresh = True
        else:
            fresh = False
        cluster, count = known
        if nodes is not None and nodes != count:
            raise EmbeddedBrokerError(
                f"{path} has a cluster of {count} {'node' if count == 1 else 'nodes'}, but {nodes} were requested: "
                f"start it with {count}, or choose another folder"
            )
        (path / MARKER).write_text(
            json.dumps({"format": 1, "cluster": cluster, "nodes": count}) + "\n", encoding="ascii"
        )
        folder = DataFolder(path=path, cluster=cluster, nodes=count, fresh=fresh)
        for number in range(1, count + 1):
            folder.node(number).mkdir(exist_ok=True)
    except BaseException:
        if made:
            shutil.rmtree(path, ignore_errors=True)
        raise
    return folder


def contents(path: Path) -> tuple[Path, ...]:
    """The files and folders of a broker in this folder; empty without a broker's data."""
    if not (path / MARKER).is_file():
        return ()
    security = path / SECURITY
    return (*sorted(path.glob("node-*")), *([security] if security.exists() else []), path / MARKER)


def discard(path: Path) -> None:
    """Remove a broker's files from this folder, and the folder itself if it is empty then."""
    for each in contents(path):
        if each.is_dir():
            shutil.rmtree(each, ignore_errors=True)
        else:
            each.unlink(missing_ok=True)
    with suppress(OSError):
        path.rmdir()


def size(path: Path) -> int:
    """The bytes on disk below this folder, without the holes in Kafka's index files."""
    total = 0
    for place, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                total += Path(place, name).lstat().st_blocks * 512
    return total


def _require_space(path: Path) -> None:
    free = shutil.disk_usage(path).free
    if free < MIN_FREE_BYTES:
        raise EmbeddedBrokerError(
            f"{path} has {free // 2**20} MB of free space, and a broker needs {MIN_FREE_BYTES // 2**20} MB: "
            "make room, or choose a folder on another disk"
        )


def _read_marker(path: Path) -> tuple[str, int] | None:
    """The cluster's id and size, or None for an empty folder."""
    try:
        found = json.loads((path / MARKER).read_text(encoding="ascii"))
        return str(found["cluster"]), int(found["nodes"])
    except FileNotFoundError:
        if any(path.iterdir()):
            raise EmbeddedBrokerError(
                f"{path} is not empty and has no broker's data: choose an empty or a new folder"
            ) from None
        return None
    except (ValueError, KeyError, TypeError) as cause:
        raise EmbeddedBrokerError(
            f"{path / MARKER} is damaged ({cause}): choose another folder, or remove this one"
        ) from cause
