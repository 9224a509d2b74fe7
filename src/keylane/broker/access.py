"""Users and rights of a secured embedded broker, and the client settings of each user."""

from __future__ import annotations

import re
import secrets
import time
from typing import TYPE_CHECKING

from keylane.broker.certificates import CertificateAuthority, write_private
from keylane.broker.errors import EmbeddedBrokerError
from keylane.kafka.client import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    KafkaException,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from keylane.kafka.settings import KafkaSettings
from keylane.rights import Operation, ResourceKind

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from keylane.kafka.client import AdminClient
    from keylane.rights import Right

BROKER_USER, ADMIN_USER = "broker", "admin"
"""The nodes themselves, and the user that may do everything."""
_MECHANISM, _ITERATIONS = "SCRAM-SHA-512", 4096
_USER = re.compile(r"[A-Za-z0-9._-]{1,100}")
_SECONDS = 10.0
_KINDS = {
    ResourceKind.TOPIC: ResourceType.TOPIC,
    ResourceKind.GROUP: ResourceType.GROUP,
    ResourceKind.TRANSACTIONAL_ID: ResourceType.TRANSACTIONAL_ID,
}
_OPERATIONS = {each: AclOperation[each.name] for each in Operation}


class BrokerAccess:
    """Creates users with a password or a certificate, and gives and takes their rights.

    Methods that return a path return a file with the user's client settings, for ``-o @FILE``. Only this user of the
    machine can read it. They return when the broker knows about the change. They raise EmbeddedBrokerError.
    """

    def __init__(self, authority: CertificateAuthority, bootstrap: str, certificate_bootstrap: str) -> None:
        self._authority = authority
        self.bootstrap = bootstrap
        """The address for users with a password."""
        self.certificate_bootstrap = certificate_bootstrap
        """The address for users with a certificate."""
        self._client: AdminClient | None = None

    @property
    def own_settings(self) -> KafkaSettings:
        """Settings of a client with the nodes' own certificate, which may do everything."""
        store = self._authority.folder / f"{BROKER_USER}.p12"
        return KafkaSettings(self.certificate_bootstrap, tuple(sorted(self._with_certificate(store).items())))

    def file(self, name: str) -> Path:
        """The file with the client settings of the user with this name and a password, whether it exists or not."""
        return self._authority.folder / f"{name}.options"

    def client(self, name: str) -> dict[str, str]:
        """The client settings of the user with this name and a password."""
        lines = self.file(name).read_text(encoding="utf-8").splitlines()
        pairs = (line.removeprefix("kafka.").partition("=") for line in lines if not line.startswith("#"))
        return {setting: value for setting, _, value in pairs}

    def add_user(self, name: str, rights: Iterable[Right] = (), *, password: str | None = None) -> Path:
        """Create a user with these rights and a password, by default a random one. An existing user gets a new one."""
        self._require_name(name)
        password = password or secrets.token_urlsafe(18)
        change = UserScramCredentialUpsertion(
            name, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, _ITERATIONS), password.encode()
        )
        for future in self._admin.alter_user_scram_credentials([change]).values():
            self._result(future)
        self.allow(name, rights)
        settings = {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": _MECHANISM,
            "sasl.username": name,
            "sasl.password": password,
            "ssl.ca.location": str(self._authority.certificate),
        }
        self._wait_until_known(settings)
        return self._write(name, self.bootstrap, settings)

    def add_certificate(self, name: str, rights: Iterable[Right] = (), *, seconds: int | None = None) -> Path:
        """Create a user with these rights and a certificate; see :meth:`CertificateAuthority.issue`."""
        self._require_name(name)
        store = self._authority.issue(name, seconds=seconds)
        self.allow(name, rights)
        return self._write(f"{name}.certificate", self.certificate_bootstrap, self._with_certificate(store))

    def allow(self, user: str, rights: Iterable[Right]) -> None:
        """Give rights to a user."""
        rules = [_rule(user, right) for right in rights]
        if rules:
            for future in self._admin.create_acls(rules).values():
                self._result(future)
            self._wait_for(rules, present=True)

    def deny(self, user: str, rights: Iterable[Right]) -> None:
        """Take rights from a user."""
        rules = [_rule(user, right) for right in rights]
        if rules:
            for future in self._admin.delete_acls([_filter(rule) for rule in rules]).values():
                self._result(future)
            self._wait_for(rules, present=False)

    @property
    def _admin(self) -> AdminClient:
        if self._client is None:
            self._client = self.own_settings.admin()
        return self._client

    def _with_certificate(self, store: Path) -> dict[str, str]:
        return {
            "security.protocol": "SSL",
            "ssl.ca.location": str(self._authority.certificate),
            "ssl.keystore.location": str(store),
            "ssl.keystore.password": self._authority.password,
        }

    def _write(self, name: str, bootstrap: str, settings: dict[str, str]) -> Path:
        path = self.file(name)
        lines = [f"# Client settings for the broker at {bootstrap}; use them with -o @FILE."]
        lines += [f"kafka.{setting}={value}" for setting, value in settings.items()]
        write_private(path, "\n".join(lines) + "\n")
        return path

    def _wait_until_known(self, settings: dict[str, str]) -> None:
        """The credentials reach the broker a moment after the controller has them."""
        client = KafkaSettings(self.bootstrap, tuple(settings.items())).admin()
        until = time.monotonic() + _SECONDS
        while True:
            try:
                client.list_topics(timeout=1.0)
            except KafkaException as error:
                if time.monotonic() > until:
                    raise EmbeddedBrokerError(f"the new user cannot log in: {error.args[0].str()}") from error
            else:
                return

    def _wait_for(self, rules: list[AclBinding], *, present: bool) -> None:
        until = time.monotonic() + _SECONDS
        for rule in rules:
            while bool(self._result(self._admin.describe_acls(_filter(rule)))) is not present:
                if time.monotonic() > until:
                    raise EmbeddedBrokerError("the broker does not learn of the new rules")
                time.sleep(0.02)

    @staticmethod
    def _require_name(name: str) -> None:
        if not _USER.fullmatch(name) or name == BROKER_USER:
            raise EmbeddedBrokerError(
                f"expected a user's name of 1 to 100 letters, digits, dots, dashes or underscores, other than "
                f"{BROKER_USER!r}; got {name!r}"
            )

    @staticmethod
    def _result(future: object) -> object:
        try:
            return future.result(_SECONDS)  # type: ignore[attr-defined]
        except KafkaException as error:
            raise EmbeddedBrokerError(f"the broker refused the change: {error.args[0].str()}") from error
        except TimeoutError as error:
            raise EmbeddedBrokerError(f"the broker did not answer within {_SECONDS:g} s") from error


def _pattern(right: Right) -> ResourcePatternType:
    return ResourcePatternType.PREFIXED if right.prefix else ResourcePatternType.LITERAL


def _rule(user: str, right: Right) -> AclBinding:
    return AclBinding(
        _KINDS[right.kind],
        right.name,
        _pattern(right),
        f"User:{user}",
        "*",
        _OPERATIONS[right.operation],
        AclPermissionType.ALLOW,
    )


def _filter(rule: AclBinding) -> AclBindingFilter:
    return AclBindingFilter(
        rule.restype,
        rule.name,
        rule.resource_pattern_type,
        rule.principal,
        rule.host,
        rule.operation,
        rule.permission_type,
    )
