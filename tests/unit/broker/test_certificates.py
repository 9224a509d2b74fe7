from __future__ import annotations

import ssl
import stat
import subprocess
from typing import TYPE_CHECKING

import pytest

from keylane.broker.certificates import CertificateAuthority, write_private

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)


def test_authority_is_made_once_and_readable_by_its_user_only(tmp_path: Path) -> None:
    made = CertificateAuthority(tmp_path / "security")
    pem = made.certificate.read_text()
    assert CertificateAuthority(tmp_path / "security").certificate.read_text() == pem
    ssl.create_default_context(cadata=pem)
    store = made.issue("shop", seconds=60)
    assert stat.S_IMODE((tmp_path / "security").stat().st_mode) == 0o700
    assert stat.S_IMODE(store.stat().st_mode) == 0o600
    assert made.password not in pem
    assert sorted(path.name for path in (tmp_path / "security").iterdir()) == [
        "ca.p12",
        "ca.pem",
        "keystore.password",
        "shop.p12",
    ]


def test_private_file_is_private_from_its_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shop.options"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "kafka.sasl.password=x\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == "kafka.sasl.password=x\n"


def test_passwords_are_not_on_a_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    run = subprocess.run

    def noted(command: list[str], **more: object) -> object:
        seen.append(command)
        return run(command, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", noted)
    made = CertificateAuthority(tmp_path / "security")
    keytool = [command for command in seen if command[0].endswith("keytool")]
    assert keytool
    assert not [command for command in keytool if made.password in command]
