"""``keylane bench``: the benchmarks of the repository."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import keylane
from keylane.errors import SettingsError


def bench(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORKLOAD]… [OPTIONS]", help="What to measure and how; --list shows the workloads."
        ),
    ] = None,
) -> None:
    """Compare Keylane with its peers: drain rate, latency and cost.

    The benchmarks and the peers are in the repository, not in the package: run this inside a checkout. The load
    generator needs Go. A peer whose tools (Maven, Java) are missing is skipped, and the output says so.

    \b
    keylane bench --list
    keylane bench --quick --only drain,chat --peers keylane,go
    keylane bench drain --n 1000000 --rounds 5
    keylane bench -- --help
    """  # noqa: D301 - the escape is click's: leave the lines as they are
    root = find_checkout(Path.cwd(), Path(keylane.__file__))
    if root is None:
        raise SettingsError(
            "the benchmarks are not part of the installed package: clone the repository and run 'keylane bench' or "
            "'make bench' inside it. They need Go for the load generator, and for the Java peers Maven"
        )
    paths = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-m", "bench", *(arguments or [])]
    with subprocess.Popen(command, cwd=root, env=environment) as running:  # noqa: S603 - our own program
        # Ctrl-C reaches the child too, which stops what it started; SIGTERM is passed on.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, _frame: running.send_signal(number))
        code = running.wait()
    raise typer.Exit(code if code >= 0 else 128 - code)


def find_checkout(here: Path, package: Path) -> Path | None:
    """Return the checkout around this folder or around the package; None if there is none."""
    for root in (here, *here.parents, *package.parents):
        if (root / "bench" / "__main__.py").is_file() and (root / "src" / "keylane").is_dir():
            return root
    return None
