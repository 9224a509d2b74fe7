"""Builds the peers and the load generator, once, outside the repository; again only when their sources changed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PEERS = Path(__file__).parent / "peers"
_SECONDS = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Something to build: from the sources in ``source``, by commands that write to the folder they are given."""

    name: str
    source: Path
    tools: tuple[str, ...]
    commands: Callable[[Path], list[list[str]]]


def _go(name: str) -> Product:
    return Product(
        name=name,
        source=PEERS / name,
        tools=("go",),
        commands=lambda to: [["go", "build", "-o", str(to / "program"), "."]],
    )


def _maven(to: Path) -> list[list[str]]:
    goals = ["compile", "dependency:copy-dependencies"]
    return [["mvn", "-q", "-B", f"-DbuildDir={to}", f"-DoutputDirectory={to / 'libs'}", *goals]]


def _jars(to: Path) -> list[list[str]]:
    return [["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={to / 'libs'}"]]


def _venv(to: Path) -> list[list[str]]:
    python = str(to / "bin" / "python")
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", "requirements.txt"]
    return [[sys.executable, "-m", "venv", str(to)], install]


TOOL = _go("bench")
GO = _go("go-affinity")
JAVA = Product(
    name="java-parallel-consumer",
    source=PEERS / "java-parallel-consumer",
    tools=("java", "mvn"),
    commands=_maven,
)
PYTHON = Product(name="python", source=PEERS / "python", tools=(), commands=_venv)
PROSODY = Product(name="prosody", source=PEERS / "prosody", tools=(), commands=_venv)
CASSANDRA = Product(name="cassandra", source=PEERS / "cassandra", tools=("java", "mvn"), commands=_jars)
SPARK = Product(
    name="spark-microbatch",
    source=PEERS / "spark-microbatch",
    tools=("java", "mvn"),
    commands=lambda to: [*_venv(to), *_jars(to)],
)
NEEDED = {
    "java": (JAVA,),
    "aiokafka": (PYTHON,),
    "raw": (PYTHON,),
    "go": (GO,),
    "prosody": (PROSODY, CASSANDRA),
    "spark": (SPARK,),
}
"""What a peer is built from; it runs from the first of them. Keylane is there already."""


class Workshop:
    """Build products into ``folder``, one folder each. ``say`` is called with what takes time."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say

    def build(self, product: Product) -> Path:
        """The folder with the product in it. Raises BenchError, in one line, when it cannot be built here."""
        missing = [tool for tool in product.tools if shutil.which(tool) is None]
        if missing:
            raise BenchError(f"{' and '.join(missing)} not found on the PATH")
        to = self._folder / product.name
        stamp, digest = to / "built", _digest(product)
        if stamp.is_file() and stamp.read_text() == digest:
            return to
        self._say(f"building {product.name} in {to} …")
        shutil.rmtree(to, ignore_errors=True)
        to.mkdir(parents=True)
        for command in product.commands(to):
            _run(command, product)
        stamp.write_text(digest)
        return to


def default_folder() -> Path:
    """Beside the broker's jars."""
    return (
        Path(os.environ.get("KEYLANE_CACHE") or platformdirs.user_cache_dir("keylane")).absolute() / "bench"
    )


def _run(command: Sequence[str], product: Product) -> None:
    try:
        answer = subprocess.run(
            command, cwd=product.source, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"{product.name} could not be built: {error}") from error
    if answer.returncode:
        said = (answer.stderr.strip() or answer.stdout.strip()).splitlines()
        raise BenchError(
            f"{product.name} could not be built: `{' '.join(command[:3])} …` in {product.source} "
            f"said: {said[-1] if said else f'exit {answer.returncode}'}"
        )


def _digest(product: Product) -> str:
    found = hashlib.sha256(repr((product.name, sys.version_info[:2])).encode())
    for path in sorted(product.source.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(path.relative_to(product.source).as_posix().encode() + b"\0")
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
