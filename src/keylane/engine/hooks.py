"""Hooks of the app: functions that are called on a retry, a dead letter, a blocked lane, a breaker or a hot key."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keylane.spec import AppSpec

log = logging.getLogger("keylane.engine")


class Hooks:
    """Calls the hooks of one app. What they raise is logged and changes nothing."""

    def __init__(self, app: AppSpec) -> None:
        self._app = app

    def call(self, name: str, *arguments: Any) -> None:
        """Call the hooks of this name."""
        for function in self._app.hooks.get(name, ()):
            try:
                function(*arguments)
            except Exception:
                log.exception("hook %s of app %r failed", name, self._app.name)
