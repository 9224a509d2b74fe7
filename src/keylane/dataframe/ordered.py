"""Lanes over a DataFrame: the app's stages on rows that lie somewhere, in order inside every key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.app import App
from keylane.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame


def ordered(
    df: DataFrame,
    *,
    app: App,
    order_by: str | Sequence[str],
    key: str = "key",
    value: str = "value",
    headers: str | None = None,
    timestamp: str | None = None,
    event_id: str | None = None,
    partitions: int | None = None,
) -> DataFrame:
    """Run the app's stages over the rows of ``df``: those of one key strictly in ``order_by`` order, keys in parallel.

    The same engine as the live app's: stages, resources, retries, breakers, policies, event ids. Nothing is read from
    or written to Kafka: ``app.source`` and ``app.sink`` are only names here. The rows that come back are the outcomes,
    as of the live app, and two things more: ``letter``, why a message failed for good (JSON; what its dead letter would
    say), and the columns of ``order_by`` that are not among the outcomes already. ``result`` is what the last stage
    returned, for an app with a ``sink`` or with ``commit="epoch"``; others have none, as when they run live.

    ``key`` and ``value`` name columns of bytes or text; a row whose key is null has a lane of its own. Columns
    ``partition`` and ``offset`` (both), ``topic``, ``timestamp`` and ``headers``, as ``keylane.topic`` has them, are
    the message's own; ``headers=`` and ``timestamp=`` name others, ``event_id`` one that stands for the header
    ``event-id``. Where there is neither a position nor an event id, the value of ``order_by`` is the event id: unique
    in its key, and the same in every run.

    ``order_by`` names one column or several. Two rows of a key that are equal in all of them are an error, and so is a
    null: what comes first must be said.

    A row whose message failed for good is ``dead`` with ``on_failure="skip"``, and its lane goes on. With ``"block"``
    and ``"block_and_dlq"`` it is ``blocked`` and what follows in its lane ``stopped``, with ``"park"`` all of them are
    ``parked``: undone, in order, to be run again by another ``ordered`` over them.

    ``partitions`` is how many Spark tasks share the keys; as many as Spark has slots. **Every action on the result runs
    the app again**: write it somewhere once, and read it from there.

    A streaming ``df`` runs micro-batch by micro-batch, and needs ``order_by="offset"``, the order of its source: any
    other would have to wait for rows that come late. A lane cannot stay stopped over micro-batches, so only
    ``on_failure="skip"`` is taken; event ids are compared inside a micro-batch; a micro-batch is sorted in memory
    (``maxOffsetsPerTrigger`` bounds it).

    Raises :class:`keylane.SettingsError` for what cannot work.
    """
    from keylane.dataframe.arrange import Columns, run  # noqa: PLC0415 - Spark is needed only from here on

    named = Columns(
        key=key,
        value=value,
        order_by=(order_by,) if isinstance(order_by, str) else tuple(order_by),
        headers=headers,
        timestamp=timestamp,
        event_id=event_id,
    )
    if not isinstance(app, App):
        raise SettingsError(f"ordered(): app must be an App, got {app!r}")
    return run(df, app.spec, named, partitions)
