"""docs/public-api.md and what can be imported are the same."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/public-api.md"
NAME = re.compile(r"^\| `(\w+)`", re.MULTILINE)
ALSO = re.compile(r"^\| `(keylane[\w.]+)\.(\w+)`", re.MULTILINE)


def section(module: str) -> str:
    return PAGE.read_text().split(f"\n## `{module}`\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("module", ["keylane", "keylane.testing", "keylane.spark"])
def test_public_api_page_lists_every_name_once(module: str) -> None:
    assert sorted(NAME.findall(section(module))) == sorted(importlib.import_module(module).__all__)


@pytest.mark.parametrize("module", ["keylane", "keylane.testing", "keylane.spark"])
def test_public_names_can_be_imported(module: str) -> None:
    loaded = importlib.import_module(module)
    assert all(getattr(loaded, name) is not None for name in loaded.__all__)


def test_public_names_of_other_modules_can_be_imported() -> None:
    named = ALSO.findall(PAGE.read_text())
    assert named
    assert all(hasattr(importlib.import_module(module), name) for module, name in named)


def test_spark_package_gives_the_function_session() -> None:
    code = "import keylane.spark.spark_session; from keylane.spark import session; assert callable(session)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_keylane_imports_no_spark() -> None:
    code = "import sys, keylane, keylane.spark; assert not [name for name in sys.modules if name.startswith('pyspark')]"
    subprocess.run([sys.executable, "-c", code], check=True)
