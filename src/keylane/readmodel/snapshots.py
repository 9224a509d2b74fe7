"""A table as a row of snapshots: each is whole, and a small pointer file says which one counts.

A snapshot is written into a folder of its own that nobody looks at; then its pointer appears under the next number, by
a rename. Who reads takes the pointer with the highest number, and keeps reading that snapshot whatever comes after it.
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
_LEFT_OVER = 3600.0
"""Seconds until a folder without a pointer is taken for the rest of a crash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """The snapshot that counts: its folder, the model's form, and where reading of each topic goes on."""

    number: int
    folder: str
    form: str
    offsets: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@wire.decoder
def decode_pointer(number: int, value: bytes) -> Pointer:
    """What a pointer's file says. Raises MalformedRecordError.

    The folder is a name that :meth:`Snapshots.new_folder` made, never a path: it is removed one day, with all that is
    in it.
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
    """The snapshots under one folder, of any file system that Spark can write to.

    Two writers at once do no harm: each writes a snapshot that is whole and says how far it has read. The one whose
    pointer comes later counts, and what the other one had read is read again.
    """

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._spark = spark
        context: Any = spark.sparkContext
        self._hadoop = context._jvm.org.apache.hadoop.fs  # noqa: SLF001 - no other way to Spark's file systems
        root = self._hadoop.Path(path)
        self._files = root.getFileSystem(context._jsc.hadoopConfiguration())  # noqa: SLF001
        self.root = self._files.makeQualified(root).toString()

    @staticmethod
    def new_folder() -> str:
        """A name for the next snapshot."""
        return uuid.uuid4().hex

    def data(self, folder: str) -> str:
        """Where the snapshot of this name is."""
        return f"{self.root}/data/{folder}"

    def current(self) -> Pointer | None:
        """None when there is no snapshot yet."""
        found = self._pointers()
        return self._read(max(found)) if found else None

    def publish(self, folder: str, form: str, offsets: Mapping[str, Mapping[str, int]]) -> Pointer:
        """Make this snapshot the one that counts."""
        number = max(self._pointers(), default=0) + 1
        pointer = Pointer(number=number, folder=folder, form=form, offsets=offsets)
        text = json.dumps({"folder": folder, "form": form, "offsets": offsets}).encode()
        new = self._path("pointers", f"new-{uuid.uuid4().hex}")
        stream = self._files.create(new, False)  # never over another
        stream.write(bytearray(text))
        stream.close()
        if not self._files.rename(new, self._path("pointers", f"{number:012d}.json")):
            raise KeylaneError(
                f"{self.root}: another update has just written snapshot {number}; update again"
            )
        return pointer

    def tidy(self, retain: float) -> int:
        """Remove what has not counted for so many seconds, and what crashes have left; returns how many snapshots."""
        pointers, now = self._pointers(), time.time()
        numbers = sorted(pointers)
        # A snapshot counted until the next one did.
        old = [one for one, then in itertools.pairwise(numbers) if now - pointers[then] > retain]
        gone = 0
        for number in old:
            name = self._read(number).folder
            self._remove("pointers", f"{number:012d}.json")
            gone += self._remove("data", name)
        named = {self._read(number).folder for number in numbers if number not in old}
        for below, known in (("data", named), ("pointers", {f"{number:012d}.json" for number in numbers})):
            for name, at in self._list(below).items():
                if name not in known and now - at > _LEFT_OVER:
                    self._remove(below, name)
        return gone

    def _pointers(self) -> dict[int, float]:
        """Their numbers, and when each was written."""
        listed = self._list("pointers").items()
        return {int(found[1]): at for name, at in listed if (found := _POINTER.fullmatch(name))}

    def _read(self, number: int) -> Pointer:
        path = self._path("pointers", f"{number:012d}.json")
        stream = self._files.open(path)
        try:
            told = bytes(stream.readAllBytes())
        finally:
            stream.close()
        try:
            return decode_pointer(number, told)
        except wire.MalformedRecordError as error:
            raise KeylaneError(
                f"{path}: expected a pointer to a snapshot: {error}. Without the file the one before counts"
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
        return int(self._files.delete(self._path(*names), True))  # and what is in it

    def _path(self, *names: str) -> Any:
        return self._hadoop.Path("/".join([self.root, *names]))
