"""Ordered processing of a DataFrame: an app's stages over its rows, in order inside every key."""

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
    """Run the app's stages over the rows of ``df``: rows of one key in ``order_by`` order, keys in parallel.

    The engine is that of the live app: stages, resources, retries, breakers, policies, event ids. Nothing is read from
    or written to Kafka; ``app.source`` and ``app.sink`` are only names here. The result has the outcomes of the live
    app and two additions: ``letter``, a JSON text with why a message failed for good, and the columns of ``order_by``
    that the outcomes do not have. ``result`` is what the last stage returned, for an app with a ``sink`` or with
    ``commit="epoch"``; otherwise it is null, as in a live run.

    **Columns.** ``key`` and ``value`` are bytes or text; a row without a key has a lane of its own. The columns
    ``partition`` and ``offset`` (both), ``topic``, ``timestamp`` and ``headers`` are used if they exist, as in
    ``keylane.topic``. ``headers=`` and ``timestamp=`` name other columns, and ``event_id=`` a column that replaces the
    header ``event-id``. Without a position and an event id, the value of ``order_by`` is the event id: unique in its
    key, and the same in every run.

    **Order.** ``order_by`` names one or several columns. Two rows of a key with equal values are an error, and so is a
    null, because their order would be undefined.

    **Failures.** With ``on_failure="skip"`` a message that failed for good is ``dead``, and its lane continues. With
    ``"block"`` and ``"block_and_dlq"`` it is ``blocked`` and the rest of its lane ``stopped``; with ``"park"`` all of
    them are ``parked``. These rows are not done: run them again with another ``ordered``.

    **Partitions.** ``partitions`` is the number of Spark tasks that share the keys, by default one per slot. **Every
    action on the result runs the app again**: write it once, and read it from there.

    **Streams.** A streaming ``df`` runs micro-batch by micro-batch and needs ``order_by="offset"``, the order of its
    source; another order would have to wait for late rows. A lane cannot stay stopped across micro-batches, so
    ``on_failure`` must be ``"skip"``. Event ids are compared within a micro-batch. A micro-batch is sorted in memory
    (``maxOffsetsPerTrigger`` bounds it).

    Raises :class:`keylane.SettingsError` for columns and settings that cannot work.
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
