"""The documentation's commands and snippets, run as a newcomer would."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from keylane.cli.main import app

if TYPE_CHECKING:
    from keylane.broker import Broker
    from support.topics import Log

ROOT = Path(__file__).parents[2]
NOISE = re.compile(
    r"GETPID|BGQUEUE|incubator modules|Setting default log level|To adjust logging level|pyspark.daemon"
)


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def run(command: list[str], folder: Path, **environment: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.timeout(400)
def test_the_readme_word_by_word(tmp_path: Path) -> None:
    """Every command and snippet of the README but `make demo`, in its order, in an empty folder."""
    state = {"KEYLANE_STATE": str(tmp_path / "state")}
    shop, orders, harness, spark = blocks("README.md", "python")
    (frames,) = blocks("docs/frames.md", "python")
    demo, install, broker, work, test, on_spark, stop = blocks("README.md", "sh")
    assert (demo.strip(), install.strip()) == ("make demo", "pip install .")  # done: the suite runs installed
    (tmp_path / "shop.py").write_text(shop)
    (tmp_path / "orders.py").write_text(orders)
    (tmp_path / "test_shop.py").write_text(harness)
    (tmp_path / "on_spark.py").write_text(spark)
    run(["bash", "-ec", test], tmp_path)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])  # the README's may be taken
    assert "export KEYLANE_BOOTSTRAP=127.0.0.1:9092" in broker
    try:
        told = run(["bash", "-ec", broker.replace("9092", port)], tmp_path, **state)
        assert "created topic receipts with 4 partitions" in told
        bootstrap = {"KEYLANE_BOOTSTRAP": f"127.0.0.1:{port}"}
        told = run(["bash", "-ec", work], tmp_path, **state, **bootstrap)
        assert "caught up: 1,000 messages done" in told
        assert "lag 0, 10 dead letters (keylane dlq list shop)" in told
        assert not [line for line in told.splitlines() if NOISE.search(line)]
        # The claims beside the commands.
        assert port in run(["keylane", "broker", "status", "--json"], tmp_path, **state)
        check = (
            "import os, sys; sys.path.insert(0, sys.argv[1]); from support.topics import Log; "
            "log = Log(os.environ['KEYLANE_BOOTSTRAP']); print(log.count('receipts'), log.count('shop.dlq'))"
        )
        assert run([sys.executable, "-c", check, str(ROOT / "tests")], tmp_path, **bootstrap).split()[:2] == [
            "990",
            "10",
        ]
        told = run(["bash", "-ec", on_spark], tmp_path, **state, **bootstrap)
        assert not [line for line in told.splitlines() if NOISE.search(line)]
        # The same again: nothing is created twice, and no message counts twice.
        told = run(
            ["bash", "-ec", broker[broker.index("keylane topic") :] + work], tmp_path, **state, **bootstrap
        )
        assert "topic orders exists, with 4 partitions; left unchanged" in told
        assert run([sys.executable, "-c", check, str(ROOT / "tests")], tmp_path, **bootstrap).split()[:2] == [
            "990",
            "10",
        ]
        (tmp_path / "frames.py").write_text(frames.replace("9092", port) + "spark.stop()\n")
        told = run([sys.executable, "frames.py"], tmp_path, **bootstrap)
        assert re.search(r"ok\|\s*990\b", told), told
        assert re.search(r"dead\|\s*10\b", told), told
        assert "an order without an amount" in told
        (operator,) = blocks("docs/failures.md", "sh")
        told = run(["bash", "-ec", operator], tmp_path, **state, **bootstrap)
        assert "an order without an amount" in told
    finally:
        run(["bash", "-ec", stop], tmp_path, **state)


def test_the_snippets_of_the_other_pages_run(tmp_path: Path) -> None:
    documents = (
        "failures",
        "events",
        "results",
        "flow",
        "batching",
        "testing",
        "audit",
        "telemetry",
        "choosing",
        "state",
        "extending",
    )
    for document in (f"docs/{name}.md" for name in documents):
        snippets = blocks(document, "python")
        assert snippets
        for snippet in snippets:
            (tmp_path / "snippet.py").write_text(snippet)
            run([sys.executable, "snippet.py"], tmp_path)


def test_the_snippet_about_publishing_runs(tmp_path: Path, broker: Broker, log: Log) -> None:
    (snippet,) = blocks("docs/publishing.md", "python")
    log.create("orders", partitions=3)
    (tmp_path / "snippet.py").write_text(snippet)
    told = run([sys.executable, "snippet.py"], tmp_path, KEYLANE_BOOTSTRAP=broker.bootstrap)
    rows = log.read("orders")
    mine = [row for row in rows if row.key == b"o-1"]
    assert [(row.header("event-type"), row.header("event-version")) for row in mine] == [
        (b"OrderPlaced", b"1"),
        (b"OrderPlaced", b"2"),
    ]
    assert mine[1].header("event-id") == b"o-1/2"
    (other,) = (row for row in rows if row.key == b"o-2")
    assert told.split()[:2] == [str(other.partition), str(other.offset)]


@pytest.mark.parametrize("document", ["DESIGN.md", "docs/guarantees.md", "docs/operations.md"])
def test_docs_cite_tests_that_exist(document: str) -> None:
    named = re.findall(r"(test_\w+\.py)(?:::(test_\w+))?", (ROOT / document).read_text())
    assert len(named) > 10
    files: dict[str, str] = {}  # a unit test and an integration test may have the same name
    for path in (ROOT / "tests").rglob("test_*.py"):
        files[path.name] = files.get(path.name, "") + path.read_text()
    missing = [f"{file}::{test}" for file, test in named if f"def {test}" not in files.get(file, "")]
    assert not missing


@pytest.mark.timeout(150)
def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "keylane", "demo", "--json",
         "--messages", "8000", "--keys", "800", "--rate", "1000", "--epoch", "2"],
        cwd=tmp_path, capture_output=True, text=True, timeout=140, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    facts = json.loads(told.stdout)
    assert facts["sound"] is True
    assert facts["ordering_violations"] == facts["lost"] == facts["duplicates"] == 0
    assert facts["retries"] >= facts["failed_at_first"] > 300
    assert facts["dead_letters"] == facts["dead_letters_expected"] > 0
    assert facts["epochs"] >= 2  # eight seconds of load: the first gap of a cold Spark can take three


COMMANDS = [
    "",
    "demo",
    "run",
    "broker",
    "broker start",
    "topic",
    "topic create",
    "topic describe",
    "seed",
    "dlq",
    "dlq list",
    "dlq redrive",
    "pause",
    "resume",
    "plan",
    "lanes",
    "lanes skip",
    "verify",
    "lag",
    "metrics",
    "console",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(command: str, tmp_path: Path) -> None:
    if command:
        called = CliRunner().invoke(app, [*command.split(), "--help"])
        assert called.exit_code == 0
        told = called.output
    else:  # as the script that was installed
        told = run(["keylane", "--help"], tmp_path)
    assert "Usage:" in told
    assert len(told.splitlines()) > 8
    assert "\\b" not in told
