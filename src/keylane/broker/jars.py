"""Kafka's jars: fetched once, cached for this user, and checked at every start against known hashes."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from keylane.broker import ivy
from keylane.broker.errors import EmbeddedBrokerError
from keylane.broker.progress import DownloadProgress, DownloadStep, OnProgress, silent
from keylane.cache import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

KAFKA_VERSION = "4.3.1"
_LOG = logging.getLogger("keylane.broker")
_JAR = re.compile(r"(?P<organisation>[^/]+)/(?P<name>.+?)-(?P<revision>\d[^/]*)\.jar")


@dataclass(frozen=True, slots=True, kw_only=True)
class Jar:
    """An expected jar: its path in the jar folder (`organisation/name-revision.jar`) and its hash."""

    path: str
    sha256: str

    @property
    def coordinates(self) -> ivy.Coordinates:
        """Its name in a registry."""
        found = _JAR.fullmatch(self.path)
        if found is None:
            raise EmbeddedBrokerError(
                f"expected a path like organisation/name-revision.jar in the list of jars, got {self.path!r}"
            )
        return ivy.Coordinates(**found.groupdict())


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A missing or changed jar: `actual` is its hash, or None if it is missing."""

    jar: Jar
    actual: str | None


@dataclass(frozen=True, kw_only=True)
class JarFolder:
    """The folder of checked jars."""

    path: Path
    jars: tuple[Jar, ...]

    @cached_property
    def classpath(self) -> str:
        """The class path. Raises EmbeddedBrokerError if the folder's name cannot be part of one."""
        if os.pathsep in str(self.path):
            raise EmbeddedBrokerError(
                f"Java cannot use jars from {self.path}, because of the {os.pathsep!r} in it: "
                "set KEYLANE_CACHE to a folder without one"
            )
        return os.pathsep.join(str(self.path / jar.path) for jar in self.jars)


Fetch = Callable[[Sequence[Jar], Path, OnProgress], None]


def fetch_with_ivy(jars: Sequence[Jar], into: Path, progress: OnProgress) -> None:
    """Fetch jars to their paths below `into`. Raises EmbeddedBrokerError with Ivy's output."""
    ivy.fetch([jar.coordinates for jar in jars], into, progress)


def listed(version: str = KAFKA_VERSION) -> tuple[Jar, ...]:
    """The jars of a Kafka version and their hashes, from the file in this package (sha256sum's format)."""
    text = resources.files("keylane.broker").joinpath(f"kafka-{version}.sha256").read_text(encoding="ascii")
    return parse_list(text)


def parse_list(text: str) -> tuple[Jar, ...]:
    """Parse sha256sum's format."""
    pairs = (line.split(maxsplit=1) for line in text.splitlines() if line.strip())
    return tuple(Jar(path=path.strip(), sha256=sha256) for sha256, path in pairs)


def damages(folder: Path, jars: Sequence[Jar]) -> tuple[Damage, ...]:
    """The jars that are missing or do not match their hash. Reads all of them."""
    actual = ((jar, _sha256(folder / jar.path)) for jar in jars)
    return tuple(Damage(jar=jar, actual=found) for jar, found in actual if found != jar.sha256)


def ensure_jars(
    progress: OnProgress = silent,
    *,
    jars: Sequence[Jar] | None = None,
    cache: Path | None = None,
    fetch: Fetch = fetch_with_ivy,
) -> JarFolder:
    """The folder with all jars, each with the right hash; fetches missing and damaged ones.

    Several processes may call it at once: one fetches, the others wait, and the folder appears atomically.
    Raises EmbeddedBrokerError if fetching fails, a fetched jar has the wrong hash, or the cache cannot be written.
    """
    wanted = listed() if jars is None else tuple(jars)
    root = cache_folder() if cache is None else cache
    folder = JarFolder(path=root / f"kafka-{KAFKA_VERSION}", jars=wanted)
    if not damages(folder.path, wanted):
        return folder
    try:
        with locked(root, progress):
            broken = damages(folder.path, wanted)  # another process may have fetched meanwhile
            if broken:
                _repair(folder, broken, fetch, progress)
    except OSError as cause:
        raise EmbeddedBrokerError(
            f"could not store Kafka's jars in {root} ({cause.strerror or cause}): free disk space and make the folder "
            "writable, or set KEYLANE_CACHE to another folder"
        ) from cause
    return folder


@contextmanager
def locked(root: Path, progress: OnProgress = silent) -> Iterator[None]:
    """Lock the cache for this process; reports DownloadStep.WAIT while another one has it."""
    root.mkdir(parents=True, exist_ok=True)
    # Never follow a link and never truncate: the name may lead to another user's file.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(
        os.open(root / f"kafka-{KAFKA_VERSION}.lock", flags, 0o600), "w", encoding="ascii"
    ) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(DownloadProgress(step=DownloadStep.WAIT, done=0, total=1))
                time.sleep(0.2)
            else:
                break
        yield


def _repair(folder: JarFolder, broken: Sequence[Damage], fetch: Fetch, progress: OnProgress) -> None:
    """Build a new folder from the good jars and fetched ones, and then replace the old folder with it."""
    for damage in broken:
        if damage.actual is not None:
            _LOG.warning(
                "fetching damaged jar again path=%s sha256=%s expected=%s",
                folder.path / damage.jar.path,
                damage.actual,
                damage.jar.sha256,
            )
    root = folder.path.parent
    for leftover in root.glob(f"{folder.path.name}.new-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(prefix=f"{folder.path.name}.new-", dir=root))
    try:
        bad = {damage.jar.path for damage in broken}
        for jar in folder.jars:
            if jar.path not in bad:
                target = fresh / jar.path
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(folder.path / jar.path, target)
        fetch([damage.jar for damage in broken], fresh, progress)
        still = damages(fresh, folder.jars)
        if still:
            raise EmbeddedBrokerError(_mismatch(still))
        fresh.chmod(0o755)
        if folder.path.exists():
            aside = Path(tempfile.mkdtemp(prefix=f"{folder.path.name}.new-", dir=root)) / "old"
            folder.path.rename(aside)
            fresh.rename(folder.path)
            shutil.rmtree(aside.parent, ignore_errors=True)
        else:
            fresh.rename(folder.path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _mismatch(still: Sequence[Damage]) -> str:
    first = still[0]
    others = f" (and {len(still) - 1} more)" if len(still) > 1 else ""
    if first.actual is None:
        return (
            f"{first.jar.path}{others} is missing although fetching reported no failure: "
            "check whether your registry mirror has it (KEYLANE_IVY_SETTINGS names its settings)"
        )
    return (
        f"{first.jar.path}{others} has the wrong hash: expected SHA-256 {first.jar.sha256}, got {first.actual}. The "
        "download was discarded. A proxy or a mirror may have changed the jar: use another network or mirror "
        "(KEYLANE_IVY_SETTINGS)"
    )


def _sha256(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return None
