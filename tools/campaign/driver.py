"""The app's process: a Spark session that takes commands as JSON lines and supervises one app at a time.

It is a process of its own so that it can be killed, and it is used for many runs because a session takes seconds to
start. A query that dies is started again after a short backoff, as a supervisor would. It ends when its stdin does.

``{"do": "start", "spec": {…}}`` · ``{"do": "stop"}`` · ``{"do": "kill_task", "number": 7}``: each is answered by a line
``{"answer": …}``; events in between are ``{"event": …, "at": monotonic ns}``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from campaign.workload import Spec, make_app
from keylane.spark import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from keylane.spark.query import LaneQuery

BACKOFF_SECONDS = 0.5
CONF = {
    "spark_python_daemon_module": "campaign.daemon",
    # How long Spark waits for a worker whose task was taken away; 2 s as it comes.
    "spark_python_task_killTimeout": "100ms",
    # A standalone executor that is killed again and again is started again and again.
    "spark_deploy_maxExecutorRetries": "-1",
}


class Supervisor:
    """Keeps the wanted app running. `_wanted` and `_query` are guarded by the lock; the thread owns the restarts."""

    def __init__(self, spark: SparkSession, say: Any) -> None:
        self._spark = spark
        self._say = say
        self._wanted: Spec | None = None
        self._query: LaneQuery | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def start(self, spec: Spec) -> None:
        with self._lock:
            self._wanted = spec
            self._keep_up()

    def stop(self) -> None:
        with self._lock:
            self._wanted, query, self._query = None, self._query, None
            if query is not None:
                query.stop()

    def kill_task(self, number: int) -> bool:
        """Take a task away from its executor; Spark runs it again."""
        context: Any = self._spark.sparkContext._jsc.sc()
        return bool(context.killTaskAttempt(number, True, "by the campaign"))

    def _watch(self) -> None:
        while True:
            time.sleep(0.1)
            with self._lock:
                query = self._query
                if self._wanted is None or (query is not None and query.isActive):
                    continue
                if query is not None:
                    self._say(event="query died", why=str(query.exception())[:2000])
                    self._query = None
            time.sleep(BACKOFF_SECONDS)
            with self._lock:
                self._keep_up()

    def _keep_up(self) -> None:
        if self._wanted is None or self._query is not None:
            return
        spec = self._wanted
        options: dict[str, Any] = {"checkpoint_location": str(spec.checkpoint), "epoch": spec.epoch}
        try:
            self._query = make_app(spec).start(self._spark, bootstrap=spec.bootstrap, **options)
        except Exception as error:
            self._say(event="start failed", why=f"{type(error).__name__}: {error}"[:2000])
        else:
            self._say(event="query started", why=str(self._query.runId))


def main() -> None:
    """Serve stdin. What Spark and its children print goes to stderr, so that stdout carries nothing but answers."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**what: Any) -> None:
        out.write(json.dumps({"at": time.monotonic_ns(), **what}) + "\n")

    spark = session(sys.argv[1], "keylane campaign", lanes_only=True, **CONF)
    supervisor = Supervisor(spark, say)
    say(answer="ready")
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["do"] == "start":
                supervisor.start(Spec(**command["spec"]))
                say(answer="started")
            elif command["do"] == "stop":
                supervisor.stop()
                say(answer="stopped")
            else:
                say(answer=supervisor.kill_task(command["number"]))
        except Exception as error:
            say(answer="failed", why=f"{type(error).__name__}: {error}"[:2000])
    os._exit(0)


if __name__ == "__main__":
    main()
