"""What an app reads off its messages besides key and value: their type, their version."""

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
    """Reads a field of the value: ``Field("type")``, or one inside another, ``Field("order.version")``.

    Of a value that the app decodes; bytes are taken for JSON. It answers None when the field is not there, and raises
    :class:`keylane.Poison` when the bytes are no JSON. Raises :class:`SettingsError` for a path that names nothing.
    """

    path: str

    def __post_init__(self) -> None:
        path: object = self.path
        if not isinstance(path, str) or not all(path.split(".")):
            raise SettingsError(f"Field({self.path!r}): needs the name of a field, or 'field.in.field'")

    def __call__(self, msg: Message) -> Any:
        """The field of this message's value, or None."""
        found = msg.value
        if isinstance(found, bytes | str):
            try:
                found = json.loads(found)
            except ValueError as error:
                raise Poison(
                    f"the field {self.path!r} cannot be read: the value is no JSON: {error}"
                ) from error
        return self.inside(found)

    def inside(self, value: Any) -> Any:
        """The field of a value that was decoded, or None."""
        for name in self.path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        return value
