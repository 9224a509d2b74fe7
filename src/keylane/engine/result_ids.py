"""Event ids of results: unique for each result, and the same in every attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blake3 import blake3

from keylane.message import EVENT_ID

if TYPE_CHECKING:
    from keylane.engine.delivery import Delivery
    from keylane.message import Headers

RESULT_ID_BYTES_MAX = 256
"""Bytes of a result's event id, unless its app's and handler's names are longer."""


def result_id_prefix(app: str, handler: str = "", index: int = 0) -> bytes:
    """What the event ids of an app's results begin with.

    ``handler``: of several handlers of a message, whose result it is; ``index``: of several results, which one. The
    first has no index. No app's name contains a colon, a plus sign or a slash, so the prefixes of an app differ.
    """
    named = f"{app}:{handler}" if handler else app
    return f"{named}+{index}/".encode() if index else f"{named}/".encode()


def result_headers(delivery: Delivery, prefix: bytes) -> Headers:
    """The message's headers, with the result's own event id as the last: the prefix, then the message's id.

    The same in every attempt, so the next app recognises a repeat; another one for every app and handler, so results
    of two apps in one topic are never taken for repeats of each other. The position of a message without an id follows
    the id of its topic: a topic that is deleted and created again has the same positions. Ids that grow too long, in a
    cycle of apps, are replaced by their hash.
    """
    headers = list(delivery.headers)
    source_id = delivery.source_id
    own = (f"{source_id}/" if source_id else "").encode() + delivery.default_event_id.encode()
    for place in reversed(range(len(headers))):  # of several the last counts
        if headers[place][0] == EVENT_ID and headers[place][1] is not None:
            own = headers.pop(place)[1] or own
            break
    own = prefix + own
    if len(own) > RESULT_ID_BYTES_MAX:
        own = prefix + blake3(own).hexdigest(length=16).encode()
    headers.append((EVENT_ID, own))
    return headers
