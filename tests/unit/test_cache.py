"""The cache folder, which may hold programs: only this user may write there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from keylane.broker import jars
from keylane.broker.errors import EmbeddedBrokerError
from keylane.cache import cache_folder
from keylane.errors import SettingsError
from keylane.spark.spark_session import worker_python

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEYLANE_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_cache_of_this_user_is_used(cache: Path, mode: int) -> None:
    cache.chmod(mode)
    assert cache_folder() == cache


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o703])
def test_cache_that_others_can_write_is_refused(cache: Path, mode: int) -> None:
    cache.chmod(mode)
    with pytest.raises(SettingsError, match="can be written by others"):
        cache_folder()
    with pytest.raises(SettingsError, match="KEYLANE_CACHE"):
        worker_python()


def test_planted_worker_python_is_replaced(cache: Path) -> None:
    made = worker_python()
    script = made.read_text()
    made.write_text("#!/bin/sh\necho planted\n")
    assert worker_python() == made
    assert made.read_text() == script
    assert [made] == list(cache.iterdir())


def test_lock_file_follows_no_symbolic_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    root = tmp_path / "cache"
    root.mkdir()
    (root / f"kafka-{jars.KAFKA_VERSION}.lock").symlink_to(precious)
    with pytest.raises(EmbeddedBrokerError, match="could not store Kafka's jars"):
        jars.ensure_jars(cache=root)
    assert precious.read_text() == "keep me"
