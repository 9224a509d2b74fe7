"""Errors of a broker that denies a right or a login: they name what is missing, and another try would not help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from keylane.errors import AccessDeniedError, BrokerError

if TYPE_CHECKING:
    from keylane.rights import Right

TOPIC_DENIED, GROUP_DENIED, CLUSTER_DENIED, TRANSACTIONAL_ID_DENIED = 29, 30, 31, 53
"""Error codes of Kafka's protocol: no right on a topic, a group, the cluster, a transactional id."""
_LOGIN_DENIED = (58, -169)
"""The broker's code for a refused login, and the client's."""
_DENIED = (TOPIC_DENIED, GROUP_DENIED, CLUSTER_DENIED, TRANSACTIONAL_ID_DENIED)


class ClientFailure(Protocol):
    """An error of the Kafka client."""

    def code(self) -> int:
        """The error code."""

    def str(self) -> str:
        """The text."""


def is_denied(error: object) -> bool:
    """Whether this is an error of the Kafka client, and the broker denied a right or the login."""
    code = getattr(error, "code", None)
    return code is not None and code() in _DENIED + _LOGIN_DENIED


def broker_error(what: str, error: ClientFailure, *rights: Right) -> BrokerError:
    """An error for what the broker did not do; if it was denied, an AccessDeniedError that names the ``rights``.

    Of several rights, the error's code says which kind is missing.
    """
    if not is_denied(error):
        return BrokerError(f"{what}: {error.str()}")
    return AccessDeniedError(f"{what}: {error.str().rstrip('.')}{remedy(error, *rights)}")


def remedy(error: ClientFailure, *rights: Right) -> str:
    """What to allow, as the end of a sentence; empty if nothing was denied."""
    code = error.code()
    if code in _LOGIN_DENIED:
        return ". Check kafka.sasl.mechanism, kafka.sasl.username and kafka.sasl.password"
    kinds = {TOPIC_DENIED: "topic", GROUP_DENIED: "group", TRANSACTIONAL_ID_DENIED: "transactional id"}
    named = [str(right) for right in rights if right.kind == kinds.get(code)]
    if code not in _DENIED:
        return ""
    return f". Allow this user {' and '.join(named)}" if named else ". Allow this user to do that"
