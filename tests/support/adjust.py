"""Changes settings of an app that a test has declared already."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keylane import App


def adjust(app: App, **settings: Any) -> None:
    """Give the app other settings, unchecked."""
    app._spec = replace(app.spec, **settings)
