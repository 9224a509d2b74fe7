"""Certificates for an embedded broker and its clients, made with the JDK's keytool by an authority of their own."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from typing import TYPE_CHECKING

from keylane.broker.errors import EmbeddedBrokerError
from keylane.spark.java import describe_java

if TYPE_CHECKING:
    from pathlib import Path

CA_FILE = "ca.pem"
_CA_STORE = "ca.p12"
_PASSWORD_FILE = "keystore.password"  # noqa: S105 - the name of a file
_VALID_DAYS = 3650
_KEY = ("-keyalg", "EC", "-groupname", "secp256r1")
_QUICK_JAVA = ("-J-XX:TieredStopAtLevel=1", "-J-XX:+UseSerialGC")
_TIMEOUT_SECONDS = 60


class CertificateAuthority:
    """An authority in a folder that only this user can read; made at its first use, and found again later.

    Raises EmbeddedBrokerError if keytool fails.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        password = folder / _PASSWORD_FILE
        if not (folder / CA_FILE).exists():
            write_private(password, secrets.token_urlsafe(24))
            (folder / _CA_STORE).unlink(missing_ok=True)
            self._keytool(
                *("-genkeypair", "-alias", "ca", *_KEY, "-dname", "CN=Keylane development CA"),
                *("-ext", "bc:c=ca:true,pathlen:0", "-ext", "ku:c=keyCertSign,cRLSign"),
                *("-validity", str(_VALID_DAYS), "-keystore", str(folder / _CA_STORE)),
            )
            pem = self._keytool("-exportcert", "-rfc", "-alias", "ca", "-keystore", str(folder / _CA_STORE))
            (folder / CA_FILE).write_text(pem, encoding="ascii")

    @property
    def certificate(self) -> Path:
        """The authority's certificate, which clients need to trust the broker (PEM)."""
        return self.folder / CA_FILE

    @property
    def password(self) -> str:
        """The password of all key stores in the folder."""
        return (self.folder / _PASSWORD_FILE).read_text(encoding="ascii")

    def issue(self, name: str, *, seconds: int | None = None) -> Path:
        """A new key and certificate for this name, as a PKCS#12 file. It serves clients, and servers on loopback.

        ``seconds``: how long it is valid, at most a day; negative for one that has expired. By default ten years.
        """
        store = self.folder / f"{name}.p12"
        partial = self.folder / f"{name}.p12.new"
        shutil.copyfile(self.folder / _CA_STORE, partial)  # keytool signs only inside one key store
        partial.chmod(0o600)
        valid = ("-validity", str(_VALID_DAYS))
        if seconds is not None:
            valid = ("-startdate", f"-1d{seconds:+d}S", "-validity", "1")  # type: ignore[assignment]
        self._keytool(
            *("-genkeypair", "-alias", name, *_KEY, "-dname", f"CN={name}", "-signer", "ca"),
            *("-ext", "SAN=ip:127.0.0.1,dns:localhost", *valid, "-keystore", str(partial)),
        )
        self._keytool("-delete", "-alias", "ca", "-keystore", str(partial))
        partial.replace(store)
        return store

    def _keytool(self, *arguments: str) -> str:
        keytool = describe_java().path.resolve().parent / "keytool"
        command = [
            str(keytool),
            *_QUICK_JAVA,
            *arguments,
            "-storetype",
            "PKCS12",
            "-storepass:env",
            "STORE_PASSWORD",
        ]
        try:
            answer = subprocess.run(  # noqa: S603 - our own command line
                command,
                env={**os.environ, "STORE_PASSWORD": self.password},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as cause:
            raise EmbeddedBrokerError(
                f"could not make a certificate with {keytool} ({cause}): install a JDK or JRE that has keytool"
            ) from cause
        if answer.returncode != 0:
            raise EmbeddedBrokerError(f"keytool failed:\n{(answer.stdout + answer.stderr).strip()}")
        return answer.stdout


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, atomically."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.unlink(missing_ok=True)
    with os.fdopen(
        os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
    ) as file:
        file.write(text)
    partial.replace(path)
