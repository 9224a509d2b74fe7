"""Snapshots of a table: each is complete, and a small pointer file says which one is current.

A snapshot is written into a new folder. Then a rename publishes its pointer under the next number. A reader takes the
pointer with the highest number and keeps reading that snapshot, whatever is published later.
"""

from __future__ import annotations

import itertools
import json
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from keylane import strict_json as wire
from keylane.errors import KeylaneError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

_FOLDER = re.compile(r"[0-9a-f]{32}")
_POINTER = re.compile(r"(\d{12})\.json")
_ORPHAN_AGE_SECONDS = 3600.0
"""The age at which a folder without a pointer counts as left over from a crash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """A published snapshot: its folder, the model's form, and the next offset to read of each topic."""

    number: int
    folder: str
    form: str
    offsets: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@wire.decoder
def decode_pointer(number: int, value: bytes) -> Pointer:
    """Decode a pointer file. Raises MalformedRecordError.

    The folder must be a name from :meth:`Snapshots.new_folder` and never a path, because it is removed later with all
    its files.
    """
    folder, form, offsets = wire.fields(wire.loads(value), "folder", "form", "offsets")
    if not _FOLDER.fullmatch(wire.text(folder)):
        raise wire.MalformedRecordError(f"expected the name of a snapshot's folder, got {folder!r:.60}")
    found = {
        topic: {str(int(p)): wire.integer(offset) for p, offset in numbers.items()}
        for topic, numbers in offsets.items()
    }
    return Pointer(number=number, folder=folder, form=wire.text(form, wire.MAX_BYTES), offsets=found)


class Snapshots:
    """The snapshots under one folder, on any file system that Spark can write to.

    Two concurrent writers are safe: each writes a complete snapshot with the offsets it has read. The later pointer
    becomes current, and the other writer's events are read again.
    """

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._spark = spark
        context: Any = spark.sparkContext
        self._hadoop = context._jvm.org.apache.hadoop.fs  # noqa: SLF001 - the only way to Spark's file systems
        root = self._hadoop.Path(path)
        self._files = root.getFileSystem(context._jsc.hadoopConfiguration())  # noqa: SLF001
        self.root = self._files.makeQualified(root).toString()

    @staticmethod
    def new_folder() -> str:
        """A name for the next snapshot."""
        return uuid.uuid4().hex

    def data(self, folder: str) -> str:
        """The path of a snapshot."""
        return f"{self.root}/data/{folder}"

    def current(self) -> Pointer | None:
        """The current snapshot; None when there is none yet."""
        found = self._pointers()
        return self._read(max(found)) if found else None

    def publish(self, folder: str, form: str, offsets: Mapping[str, Mapping[str, int]]) -> Pointer:
        """Make this snapshot current. Raises :class:`KeylaneError` when another writer took its number."""
        number = max(self._pointers(), default=0) + 1
        pointer = Pointer(number=number, folder=folder, form=form, offsets=offsets)
        text = json.dumps({"folder": folder, "form": form, "offsets": offsets}).encode()
        new = self._path("pointers", f"new-{uuid.uuid4().hex}")
        stream = self._files.create(new, False)  # never overwrite
        stream.write(bytearray(text))
        stream.close()
        if not self._files.rename(new, self._path("pointers", f"{number:012d}.json")):
            raise KeylaneError(
                f"{self.root}: another update has just published snapshot {number}; update again"
            )
        return pointer

    def tidy(self, retain: float) -> int:
        """Remove leftovers of crashes, and snapshots that were replaced more than ``retain`` seconds ago.

        Returns the number of removed snapshots.
        """
        pointers, now = self._pointers(), time.time()
        numbers = sorted(pointers)
        # A snapshot was current until the next one was published.
        old = [
            number for number, following in itertools.pairwise(numbers) if now - pointers[following] > retain
        ]
        removed = 0
        for number in old:
            name = self._read(number).folder
            self._remove("pointers", f"{number:012d}.json")
            removed += self._remove("data", name)
        current = {self._read(number).folder for number in numbers if number not in old}
        for below, known in (("data", current), ("pointers", {f"{number:012d}.json" for number in numbers})):
            for name, at in self._list(below).items():
                if name not in known and now - at > _ORPHAN_AGE_SECONDS:
                    self._remove(below, name)
        return removed

    def _pointers(self) -> dict[int, float]:
        """When each pointer was written, by its number."""
        listed = self._list("pointers").items()
        return {int(found[1]): at for name, at in listed if (found := _POINTER.fullmatch(name))}

    def _read(self, number: int) -> Pointer:
        path = self._path("pointers", f"{number:012d}.json")
        stream = self._files.open(path)
        try:
            content = bytes(stream.readAllBytes())
        finally:
            stream.close()
        try:
            return decode_pointer(number, content)
        except wire.MalformedRecordError as error:
            raise KeylaneError(
                f"{path}: expected a pointer to a snapshot: {error}. Remove the file to use the snapshot before it"
            ) from error

    def _list(self, below: str) -> dict[str, float]:
        path = self._path(below)
        if not self._files.exists(path):
            return {}
        return {
            status.getPath().getName(): status.getModificationTime() / 1000
            for status in self._files.listStatus(path)
        }

    def _remove(self, *names: str) -> int:
        return int(self._files.delete(self._path(*names), True))  # recursive

    def _path(self, *names: str) -> Any:
        return self._hadoop.Path("/".join([self.root, *names]))
