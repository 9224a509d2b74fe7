from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from keylane.errors import KeylaneError
from keylane.spark import java

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(20)


@pytest.mark.parametrize(
    ("banner", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment (build 17.0.15+6)', 17),
        ('java version "1.8.0_402"\nJava(TM) SE Runtime Environment', 8),
        ('openjdk version "11.0.2" 2019-01-15', 11),
        ('openjdk version "21" 2023-09-19 LTS', 21),
        ('openjdk version "25-ea" 2025-09-16', 25),
        ('openjdk version "17-internal" 2021-09-14', 17),
        ('java version "9"', 9),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "22.0.1" 2024-04-16', 22),
        ("Unable to locate a Java Runtime.", None),
        ("", None),
    ],
)
def test_major_version_is_read_from_javas_output(banner: str, major: int | None) -> None:
    assert java.parse_version(banner) == major


def fake_java(home: Path, banner: str, code: int = 0) -> Path:
    path = home / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho '{banner}' >&2\nexit {code}\n")
    path.chmod(0o755)
    return path


def test_java_home_comes_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_java(tmp_path, 'openjdk version "21.0.1"')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert java.find_java() == path


def test_path_is_used_without_java_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_java(tmp_path, 'openjdk version "17"')
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(path.parent))
    assert java.find_java() == path


def test_an_old_java_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path, 'java version "1.8.0_402"')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(java.JavaError, match=r"is Java 8: install"):
        java.find_java()


def test_no_java_is_one_sentence_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KeylaneError, match=r"no Java found .* install a JDK or JRE 17 or newer") as caught:
        java.find_java()
    assert "\n" not in str(caught.value)


def test_a_wrong_java_home_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(java.JavaError, match="correct JAVA_HOME"):
        java.find_java()


def test_stub_that_only_complains_is_not_a_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path, "Unable to locate a Java Runtime.", code=1)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(java.JavaError, match="does not run"):
        java.find_java()
