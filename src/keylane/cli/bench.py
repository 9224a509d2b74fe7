"""``keylane bench``: the benchmarks of the checkout that this package runs from."""

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
        typer.Argument(metavar="[WORKLOAD]… [OPTIONS]", help="What to measure and how; --list shows what."),
    ] = None,
) -> None:
    """Measure Keylane beside its peers: how fast a topic is drained, how long a message takes, what it costs.

    The benchmarks and the peers are part of the repository, not of the package: run it inside a checkout. It needs
    Go for the load generator; a peer whose tools are missing (Maven, Java) is left out, and the output says so.

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
        # Ctrl-C reaches it too, and it stops what it started; SIGTERM is passed on.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, _frame: running.send_signal(number))
        code = running.wait()
    raise typer.Exit(code if code >= 0 else 128 - code)


def find_checkout(here: Path, package: Path) -> Path | None:
    """The checkout around this folder, or the one that the package itself is in; None when there is none."""
    for root in (here, *here.parents, *package.parents):
        if (root / "bench" / "__main__.py").is_file() and (root / "src" / "keylane").is_dir():
            return root
    return None
