"""The errors that Keylane raises on purpose, and the two that handlers raise to say what kind of failure it was."""

from __future__ import annotations


class KeylaneError(Exception):
    """What a user can act on: the message says what was wrong, where, and what to do."""


class SettingsError(KeylaneError):
    """An app, an option or a command line that cannot work; raised before anything is started."""


class KafkaError(KeylaneError):
    """The broker, a topic or the client refused; says which and why."""


class ResourceError(KeylaneError):
    """A resource of the app could not be opened or closed; names it and carries the cause."""


class Transient(Exception):  # noqa: N818 - named for what a handler says, not for the class of thing it is
    """Raised by a stage: this may work later. The lane waits and the message runs again."""


class Poison(Exception):  # noqa: N818 - see Transient
    """Raised by a stage: this message will never work. It becomes a dead letter without a retry."""
