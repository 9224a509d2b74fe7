"""What a worker says of itself. Shipped to it by value: it must run where Keylane is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def describe(names: list[str]) -> tuple[str, str, dict[str, str], float]:
    """The machine's name, its Python, the versions of these packages, and the time there."""
    import platform  # noqa: PLC0415 - everything it needs travels with it
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

        time.sleep(0.3)  # so that no worker takes all of them
        yield describe(names)

    return each
