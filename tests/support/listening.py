"""``python listening.py BOOTSTRAP NAME FOLDER`` runs an app over what is there, and prints what a listener heard.

A process of its own: Spark calls a listener through a server that py4j starts once in a process, and one that has run
other sessions and streams before may have lost it. Then Spark waits for an answer endlessly.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keylane import App, Breaker, Message, Poison, Telemetry, Transient
from keylane.spark import session
from keylane.spark.listener import EpochFigures, EpochListener
from keylane.testing import HistoryWriter


def make(name: str, folder: Path, **settings: Any) -> App:
    app = App(
        name,
        source=f"{name}.in",
        observer=HistoryWriter(folder / "history"),
        telemetry=Telemetry(interval=0.2),
        **settings,
    )

    @app.stage(breaker=Breaker())
    async def work(msg: Message) -> None:
        await asyncio.sleep(0.005)
        if msg.value == b"bad":
            raise Poison("bad")
        if msg.value == b"once" and msg.attempt == 1:
            raise Transient("not yet")

    return app


def main(bootstrap: str, name: str, folder: str) -> None:
    told: list[EpochFigures] = []
    heard = threading.Event()

    def tell(figures: EpochFigures) -> None:
        told.append(figures)
        if figures.processed:
            heard.set()

    spark = session("local[2]", "listening", lanes_only=True)
    try:
        listener = EpochListener(name, f"{name}.in", bootstrap=bootstrap, tell=tell)
        spark.streams.addListener(listener)
        query = make(name, Path(folder)).start(spark, bootstrap=bootstrap, available_now=True, outcomes="all")
        query.awaitTermination()
        assert heard.wait(10)
        progress = next(p for p in query.recentProgress if p["observedMetrics"]["keylane"]["rows"])
        spark.streams.removeListener(listener)
    finally:
        spark.stop()
    latest = progress["sources"][0]["latestOffset"]
    found = {
        "told": [asdict(figures) for figures in told],
        "observed": progress["observedMetrics"]["keylane"].asDict(),
        "latest": json.loads(latest) if isinstance(latest, str) else latest,
    }
    sys.stdout.write(json.dumps(found, default=str) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
