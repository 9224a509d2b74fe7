"""An app that takes over the states of products by their versions, and a process of its own that dies while it runs.

``python products.py BOOTSTRAP NAME FOLDER DELIVERY NUMBER`` dies, as by ``kill -9``, in the stage's NUMBER-th call.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from pathlib import Path
from typing import Any

from keylane import App, Message, VersionOrdering
from keylane.testing import HistoryWriter
from support.tasks import Runner
from support.topics import Log


def product(name: str, folder: Path, *, dies_at: int = 0, **settings: Any) -> App:
    """Hands over the state of a product: its version."""
    app = App(
        name,
        source=f"{name}.in",
        sink=f"{name}.out",
        versions=settings.pop("versions", VersionOrdering(wait=20.0)),
        observer=HistoryWriter(folder / "history", owner=str(settings.pop("owner", "task"))),
        **settings,
    )
    calls = itertools.count(1)

    @app.stage
    async def update(msg: Message) -> bytes:
        await asyncio.sleep(0.001)
        if next(calls) == dies_at:
            os._exit(9)
        return bytes(msg.value)

    return app


if __name__ == "__main__":
    bootstrap, name, folder, delivery, number = sys.argv[1:]
    dying = product(name, Path(folder), dies_at=int(number), delivery=delivery, commit_interval=0.02)
    Runner(Log(bootstrap), name, Path(folder), dying).run()
