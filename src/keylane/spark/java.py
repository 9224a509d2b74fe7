"""Lookup of the Java that Spark and the embedded broker run on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from keylane.errors import KeylaneError

OLDEST_JAVA_VERSION = 17
_REMEDY = f"install a JDK or JRE {OLDEST_JAVA_VERSION} or newer and put it on PATH, or point JAVA_HOME at it"


class JavaError(KeylaneError):
    """Java is missing or too old; the message says what was found and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Java:
    """A working Java: the path of `java`, its `major` version and its full version text."""

    path: Path
    major: int
    banner: str


def find_java() -> Path:
    """Return the `java` to use: the one in JAVA_HOME if set, else the one on PATH.

    Raises JavaError if Java is missing, does not run, or is older than 17.
    """
    return describe_java().path


def describe_java() -> Java:
    """Like `find_java`, with the version; asks each `java` once per process."""
    path = _candidate()
    banner = _ask_version(path)
    major = parse_version(banner)
    if major is None:
        raise JavaError(f"could not read the Java version of {path}, got {_first_line(banner)!r}: {_REMEDY}")
    if major < OLDEST_JAVA_VERSION:
        raise JavaError(
            f"expected Java {OLDEST_JAVA_VERSION} or newer, but {path} is Java {major}: {_REMEDY}"
        )
    return Java(path=path, major=major, banner=banner)


def parse_version(banner: str) -> int | None:
    """Parse the major version from `java -version`, or None: 8 for "1.8.0_402", 25 for "25-ea"."""
    found = re.search(r'version "(\d+)(?:\.(\d+))?', banner)
    if found is None:
        return None
    first, second = int(found[1]), found[2]
    return int(second) if first == 1 and second is not None else first


def _candidate() -> Path:
    home = os.environ.get("JAVA_HOME")
    if home:
        path = Path(home) / "bin" / "java"
        if not os.access(path, os.X_OK):
            raise JavaError(
                f"JAVA_HOME is {home}, but {path} does not exist: correct JAVA_HOME, or unset it to use PATH"
            )
        return path
    found = shutil.which("java")
    if found is None:
        raise JavaError(f"no Java found (JAVA_HOME is not set and PATH has no java): {_REMEDY}")
    return Path(found)


@lru_cache(maxsize=8)
def _ask_version(path: Path) -> str:
    try:
        answer = subprocess.run(  # noqa: S603 - the user's own java
            [str(path), "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise JavaError(f"{path} does not run ({cause}): {_REMEDY}") from cause
    banner = (answer.stderr + answer.stdout).strip()
    if answer.returncode != 0:  # like the stub of macOS without Java
        raise JavaError(f"{path} does not run ({_first_line(banner)!r}): {_REMEDY}")
    return banner


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")
