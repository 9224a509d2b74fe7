"""The options of a run, with Spark's and Kafka's names where they exist."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from keylane import strict_json as wire
from keylane.errors import SettingsError
from keylane.kafka.settings import BOOTSTRAP, client_settings, find_bootstrap
from keylane.logs import FORMATS
from keylane.offsets.shard import WHOLE, Shard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from keylane.kafka.settings import KafkaSettings

_KNOWN = (
    "bootstrap",
    BOOTSTRAP,
    "startingOffsets",
    "epoch",
    "keepAlive",
    "tasks",
    "shard",
    "outcomes",
    "checkpointLocation",
    "queryName",
    "availableNow",
    "format",
    "path",
    "logFormat",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of a run.

    ====================== =====================================================================================
    ``bootstrap``          the broker's address; also ``kafka.bootstrap.servers``, or the environment's
                           ``KEYLANE_BOOTSTRAP``
    ``startingOffsets``    where to start when the group has no progress yet: ``"earliest"`` (default), ``"latest"``, or
                           JSON as for Spark's Kafka source: ``{"topic": {"0": 23, "1": -2}}`` (-2 earliest, -1 latest)
    ``epoch``              seconds per epoch, after which the next one is planned; 300
    ``keepAlive``          seconds that lanes keep running without a Spark task, between two epochs or after the driver
                           died; then they drain and are released; 10. 0: every epoch ends with a drain
    ``tasks``              largest number of tasks; by default Spark's slots
    ``shard``              the run's share of the partitions, such as ``"3/8"``, the third of eight; all of them
                           when not given
    ``outcomes``           outcome rows: ``"all"``, ``"failed"`` (retried, or with a dead letter), ``"none"``;
                           all, but only failed ones for the sink ``noop``, where nothing reads them
    ``checkpointLocation`` Spark's checkpoint; a temporary one when not given. A shard uses a folder of its own in it
    ``queryName``          the query's name in Spark; the app's name, and the shard
    ``availableNow``       process what the source holds now, then end
    ``format``, ``path``   the query's sink for outcome rows, as of ``writeStream``; ``"noop"``: they go nowhere
    ``logFormat``          how tasks write their logs: ``"text"`` or ``"json"``, a line for every event
    ``kafka.…``            any setting of librdkafka, for SASL, TLS and the like
    ====================== =====================================================================================
    """

    settings: KafkaSettings
    starting: str | Mapping[int, int] = "earliest"
    epoch: float = 300.0
    keep_alive: float = 10.0
    tasks: int | None = None
    shard: Shard = WHOLE
    outcomes: str = "all"
    checkpoint: str | None = None
    name: str | None = None
    available_now: bool = False
    format: str = "noop"
    path: str | None = None
    log_format: str = "text"

    @classmethod
    def parse(cls, given: Mapping[str, Any], topic: str) -> Options:
        """Build options from the user's. Raises :class:`SettingsError` with the option and a similar name."""
        extra = {}
        for name in given:
            if name in _KNOWN:
                continue
            if not name.startswith("kafka."):
                near = difflib.get_close_matches(name, _KNOWN, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f". Known: {', '.join(_KNOWN)}, kafka.*"
                raise SettingsError(f"unknown option {name!r}{hint}")
            extra[name.removeprefix("kafka.")] = str(given[name])
        bootstrap = find_bootstrap(given.get("bootstrap"), given.get(BOOTSTRAP))
        return cls(
            settings=client_settings(bootstrap, extra),
            starting=_starting(given.get("startingOffsets", "earliest"), topic),
            epoch=_number("epoch", given.get("epoch", 300.0)),
            keep_alive=_number("keepAlive", given.get("keepAlive", 10.0), zero=True),
            tasks=None
            if given.get("tasks") in (None, "auto")
            else int(_number("tasks", given["tasks"], whole=True)),
            shard=_shard(given.get("shard")),
            outcomes=_choice(
                "outcomes",
                given.get("outcomes", "failed" if given.get("format", "noop") == "noop" else "all"),
                ("all", "failed", "none"),
            ),
            checkpoint=given.get("checkpointLocation"),
            name=given.get("queryName"),
            available_now=_yes("availableNow", given.get("availableNow", False)),
            format=str(given.get("format", "noop")),
            path=given.get("path"),
            log_format=_choice("logFormat", given.get("logFormat", "text"), FORMATS),
        )


def _number(name: str, value: Any, *, whole: bool = False, zero: bool = False) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    fits = 0 < number < inf or (zero and number == 0)
    if isinstance(value, bool) or not fits or (whole and number % 1):
        needed = "whole number of at least 1" if whole else "number from 0 on" if zero else "number above 0"
        raise SettingsError(f"option {name} must be a {needed}, got {value!r}")
    return number


def _shard(value: Any) -> Shard:
    if value is None:
        return WHOLE
    try:
        return Shard.parse(str(value))
    except ValueError as error:
        raise SettingsError(f"option shard: {error}") from None


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise SettingsError(f"option {name} must be one of {', '.join(choices)}, got {value!r}")
    return str(value)


def _yes(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    return _choice(name, str(value).lower(), ("true", "false")) == "true"


def _starting(value: Any, topic: str) -> str | dict[int, int]:
    if value in ("earliest", "latest"):
        return str(value)
    try:
        offsets = wire.loads(value)[topic]
        found = {int(partition): offset for partition, offset in offsets.items()}
        if any(p < 0 or type(offset) is not int or offset < -2 for p, offset in found.items()):
            raise ValueError(value)
    except (TypeError, ValueError, KeyError, AttributeError):
        raise SettingsError(
            'option startingOffsets must be "earliest", "latest" or JSON such as '
            f'{{"{topic}": {{"0": 23, "1": -2}}}}, got {value!r:.200}'
        ) from None
    return found
