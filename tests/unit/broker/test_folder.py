from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from keylane.broker import EmbeddedBrokerError, folder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(20)


def test_new_folder_is_created_and_reused(tmp_path: Path) -> None:
    first = folder.open_folder(tmp_path / "a" / "b", broker="k", nodes=3)
    again = folder.open_folder(tmp_path / "a" / "b", broker="k", nodes=None)
    assert first.fresh
    assert not again.fresh
    assert (again.cluster, again.nodes) == (first.cluster, 3)


def test_folder_without_a_path_is_temporary() -> None:
    made = folder.open_folder(None, broker="ktemp", nodes=None)
    assert "ktemp" in made.path.name
    assert made.nodes == 1
    folder.discard(made.path)
    assert not made.path.exists()


def test_folder_refuses_another_number_of_nodes(tmp_path: Path) -> None:
    folder.open_folder(tmp_path / "data", broker="k", nodes=3)
    with pytest.raises(EmbeddedBrokerError, match="has a cluster of 3 nodes"):
        folder.open_folder(tmp_path / "data", broker="k", nodes=1)
    assert (tmp_path / "data" / folder.MARKER).exists()


def test_folder_with_foreign_files_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(EmbeddedBrokerError, match="is not empty and has no broker's data"):
        folder.open_folder(tmp_path, broker="k", nodes=1)
    folder.discard(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_discard_removes_only_the_brokers_files(tmp_path: Path) -> None:
    folder.open_folder(tmp_path / "data", broker="k", nodes=2)
    (tmp_path / "data" / "notes.txt").touch()
    folder.discard(tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["notes.txt"]


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        EmbeddedBrokerError, match=r"cannot store its data in .*file.*choose a writable folder"
    ):
        folder.open_folder(tmp_path / "file", broker="k", nodes=1)


def test_full_disk_is_reported_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "MIN_FREE_BYTES", 2**60)
    with pytest.raises(EmbeddedBrokerError, match="MB of free space, and a broker needs"):
        folder.open_folder(tmp_path / "data", broker="k", nodes=1)
    assert not (tmp_path / "data").exists()


def test_damaged_marker_is_an_error(tmp_path: Path) -> None:
    (tmp_path / folder.MARKER).write_text("{")
    with pytest.raises(EmbeddedBrokerError, match="is damaged"):
        folder.open_folder(tmp_path, broker="k", nodes=1)


def test_holes_in_files_do_not_count_as_size(tmp_path: Path) -> None:
    with (tmp_path / "index").open("wb") as file:
        file.truncate(10_000_000)
    (tmp_path / "log").write_bytes(b"x" * 100_000)
    assert 50_000 < folder.size(tmp_path) < 1_000_000
