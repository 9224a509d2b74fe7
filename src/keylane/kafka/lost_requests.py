"""Whether a producer lost a connection, and with it the answer to a request.

The client sends such a request again by itself, and says so only in its log. The first copy may still reach the broker,
when the next transaction has begun. Every lost request is a lost connection: the client also closes the connection on
which an answer is late (``socket.timeout.ms``).
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_STATE = re.compile(r"\bin state ([A-Z_]+)")
_WITH_REQUESTS = frozenset({"UP", "UPDATE", "REAUTH"})
"""States of a connection in which the client has sent requests; the others are of a connection that is set up."""


class LostRequests:
    """The logger of one client. ``any``: whether a request may have been lost. Passes warnings on to ``log``.

    The client calls it while it is polled, on the thread that polls.
    """

    def __init__(self, log: logging.Logger) -> None:
        self.any = False
        self._log = log
        self._level = logging.WARNING

    def settings(self, given: Mapping[str, str]) -> dict[str, Any]:
        """The client settings that this needs, with what the user has ``given`` for them."""
        debug = given.get("debug", "")
        if debug:
            self._level = logging.DEBUG
        return {
            # The plain log leaves out connections that are closed because the coordinator has moved.
            "debug": f"{debug},broker" if debug else "broker",
            "log_level": 7,
            "log.connection.close": True,
        }

    def log(self, level: int, *line: Any) -> None:
        """Take a line of the client's log: a format and its values, the first of which is the facility."""
        if len(line) > 1 and line[1] == "FAIL":
            self._take(level, str(line[-1]))
        if level >= self._level:
            self._log.log(level, *line)

    def _take(self, level: int, text: str) -> None:
        state = _STATE.search(text)
        if state is not None and state[1] not in _WITH_REQUESTS:
            return
        # At the debug level alone: a connection without requests that the broker closed after minutes of silence.
        if level >= logging.INFO or "Disconnected" not in text:
            self.any = True
