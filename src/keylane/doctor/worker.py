"""Self-description of a Spark worker.

It travels to the worker by value, because Keylane may not be installed there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def describe(names: list[str]) -> tuple[str, str, dict[str, str], float]:
    """The machine's name, its Python version, the versions of these packages, and its clock."""
    import platform  # noqa: PLC0415 - module-level imports do not travel with it
    import socket  # noqa: PLC0415
    import time  # noqa: PLC0415
    from importlib import metadata  # noqa: PLC0415

    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return socket.gethostname(), platform.python_version(), found, time.time()


def describe_each(names: list[str]) -> Any:
    """For ``mapPartitions``: one description for each partition."""

    def each(_rows: Iterable[Any]) -> Iterator[tuple[str, str, dict[str, str], float]]:
        import time  # noqa: PLC0415

        time.sleep(0.3)  # long enough for every worker to get a partition
        yield describe(names)

    return each
