"""Fields of a message's value, from which an app reads the event type or the version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane.errors import Poison, SettingsError

if TYPE_CHECKING:
    from keylane.message import Message


@dataclass(frozen=True, slots=True)
class Field:
    """A reader of one field of the value: ``Field("type")``, or a nested one, ``Field("order.version")``.

    The value is the one that the app decodes; bytes are read as JSON. The result is None if the field is missing.
    Calling it raises :class:`keylane.Poison` if the bytes are not JSON. Raises :class:`SettingsError` for an invalid
    path.
    """

    path: str

    def __post_init__(self) -> None:
        path: object = self.path
        if not isinstance(path, str) or not all(path.split(".")):
            raise SettingsError(f"Field({self.path!r}): expected the name of a field, or 'field.in.field'")

    def __call__(self, msg: Message) -> Any:
        """The field of this message's value, or None."""
        found = msg.value
        if isinstance(found, bytes | str):
            try:
                found = json.loads(found)
            except ValueError as error:
                raise Poison(
                    f"the field {self.path!r} cannot be read: the value is not JSON: {error}"
                ) from error
        return self.inside(found)

    def inside(self, value: Any) -> Any:
        """The field of a decoded value, or None."""
        for name in self.path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        return value
