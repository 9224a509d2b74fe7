"""The errors that Keylane raises on purpose, and the two that handlers raise to say what kind of failure it was."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class KeylaneError(Exception):
    """What a user can act on: the message says what was wrong, where, and what to do."""


class SettingsError(KeylaneError):
    """An app, an option or a command line that cannot work; raised before anything is started."""


class BrokerError(KeylaneError):
    """The broker, a topic or the client refused; says which and why."""


class AccessDeniedError(BrokerError):
    """The broker denied a right, a login or a certificate; names it. Another try gives the same answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Undelivered:
    """A message that a publisher could not deliver, as it was to be sent."""

    event_id: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    why: str


class DeliveryError(BrokerError):
    """A publisher's messages were not delivered; ``undelivered`` are all of them, in the order of their failures."""

    def __init__(self, message: str, undelivered: Sequence[Undelivered] = ()) -> None:
        super().__init__(message)
        self.undelivered = tuple(undelivered)


class DataLossError(KeylaneError):
    """Messages to be read are no longer in their topic; says which, and how to continue without them."""


class AbortedError(BrokerError):
    """A transaction was not taken; nothing of it counts."""


class ResourceError(KeylaneError):
    """A resource of the app could not be opened or closed; names it and carries the cause."""


class FailureGuardError(KeylaneError):
    """Most messages fail for good; the app stopped instead of emptying its topic into the dead letters.

    ``reason`` is the message without the remedy.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"{reason} {remedy}".rstrip())
        self.reason = reason


class FencedError(KeylaneError):
    """Another task has taken over what this one owned: nothing that it does from here on counts."""


class SourceChangedError(KeylaneError):
    """The source topic is not the one that the epoch was planned for: it was deleted, and perhaps created again."""


class TakenOverError(KeylaneError):
    """Another run of the app has taken over; this one ends and must not be restarted automatically."""


class Transient(Exception):  # noqa: N818 - named for what a handler says, not for the class of thing it is
    """Raised by a stage: this may work later. The lane waits and the message runs again.

    ``retry_after`` asks for a wait of that many seconds instead of the backoff, up to the ``wait_asked_max`` of
    :class:`keylane.Retry`. Raises :class:`ValueError` when it is not a number of seconds from 0 on.
    """

    # On the class too: a subclass that never calls __init__ has asked for nothing.
    retry_after: float | None = None

    def __init__(self, *args: object, retry_after: float | None = None) -> None:
        super().__init__(*args)
        if retry_after is not None and not _is_seconds(retry_after):
            raise ValueError(f"{type(self).__name__}(retry_after={retry_after!r}): needs seconds, 0 or more")
        self.retry_after = retry_after


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < inf


class Poison(Exception):  # noqa: N818 - see Transient
    """Raised by a stage: this message will never work. It becomes a dead letter without a retry."""
