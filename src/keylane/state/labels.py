"""Labels on records of the state topic: the topic whose offsets a record holds.

A record that holds offsets of the source, or of the dead letters, carries that topic's identity in a header. Readers
take only records about the topics as they are now: an offset of a topic that was deleted and created again, of another
topic or of another cluster means another message here. Everything else (runs, claims, plans, commands to stop and to
cancel, the audit) is about the app, carries no label and is always taken.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from keylane.lanes.lane_record import KEYLESS, LANE
from keylane.state.commands import LETTERS, MESSAGE, RESET
from keylane.state.topic import (
    ATTEMPTS,
    EPOCH,
    FORMER,
    GROUPED,
    LAYOUT,
    LOAD,
    PROGRESS,
    RANGE,
    REDRIVEN,
    REST,
    VERSION,
    VERSIONS,
    kind_of,
)

if TYPE_CHECKING:
    from keylane.message import Headers
    from keylane.offsets.identity import AppIdentity

log = logging.getLogger("keylane.kafka")

SOURCE, DLQ = "keylane-source", "keylane-dlq"
"""Names of the headers."""

_OF_SOURCE = (
    PROGRESS,
    EPOCH,
    FORMER,
    RANGE,
    GROUPED,
    ATTEMPTS,
    VERSION,
    VERSIONS,
    LAYOUT,
    LANE,
    KEYLESS,
    LOAD,
    REST,
    MESSAGE,
    RESET,
)
_OF_DLQ = (REDRIVEN, LETTERS)


class Labels:
    """Writes and checks the labels of one app's records.

    Without an identity every record that holds offsets is refused: for readers that only ask about the app.
    """

    def __init__(self, identity: AppIdentity | None) -> None:
        self.identity = identity
        self.foreign: Counter[str] = Counter()
        """Records that were refused, by kind."""
        self._source = (SOURCE, b"" if identity is None else identity.source.encode())
        self._dlq = (DLQ, b"" if identity is None else identity.dlq.encode())

    def of(self, name: bytes) -> Headers:
        """The headers of the record with this name."""
        if name == EPOCH:  # progress in the source, and redriven dead letters
            return [self._source, self._dlq]
        if name.startswith(_OF_SOURCE):
            return [self._source]
        return [self._dlq] if name.startswith(_OF_DLQ) else []

    def accepts(self, name: bytes, message: Any) -> bool:
        """Whether the record is about the topics as they are now, or about none."""
        if name.startswith(_OF_SOURCE):
            label = self._source
        elif name.startswith(_OF_DLQ):
            label = self._dlq
        else:
            return True
        if self.identity is None:
            return False
        headers = message.headers() or ()
        if label in headers:
            return True
        kind = kind_of(name)
        self.foreign[kind] += 1
        if self.foreign[kind] == 1:
            found = next((value for header, value in headers if header == label[0] and value), b"no topic")
            log.warning(
                "ignoring state records of another topic kind=%s expected=%s found=%s first=%s/%d@%d",
                kind,
                label[1].decode(),
                found.decode("utf-8", "backslashreplace"),
                message.topic(),
                message.partition(),
                message.offset(),
            )
        return False

    def letters_match(self, message: Any) -> bool:
        """True if the record's dead letters are in the dead-letter topic as it is now."""
        return self._dlq in (message.headers() or ())
