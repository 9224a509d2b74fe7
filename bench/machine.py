"""Facts about the machine and the versions, for comparing figures."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import confluent_kafka

from keylane.broker.jars import KAFKA_VERSION
from keylane.spark.java import describe_java

_ROOT = Path(__file__).parents[1]


def facts() -> dict[str, str]:
    """Name and value, in the order in which they are shown."""
    java = re.search(r'version "([^"]+)"', describe_java().banner)
    return {
        "measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "keylane": _keylane(),
        "cores": str(cores()),
        "processor": _processor(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "load average at the start": f"{os.getloadavg()[0]:.2f}",
        "Python": platform.python_version(),
        "Java": java[1] if java else "?",
        "Go": _said(["go", "env", "GOVERSION"]).removeprefix("go"),
        "Kafka": KAFKA_VERSION,
        "Spark": version("pyspark"),
        "confluent-kafka": version("confluent-kafka"),
        "librdkafka": confluent_kafka.libversion()[0],
    }


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _keylane() -> str:
    commit = _said(["git", "rev-parse", "--short", "HEAD"])
    changed = " with changes" if commit and _said(["git", "status", "--porcelain", "--", "src"]) else ""
    return version("keylane") + (f" at {commit}{changed}" if commit else "")


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _said(command: list[str]) -> str:
    try:
        answer = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
