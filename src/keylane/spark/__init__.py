"""The Spark edge: sessions, topics as DataFrames, figures of every epoch.

The public names are loaded when they are first used, because importing PySpark takes half a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keylane.spark.listener import EpochFigures, EpochListener
    from keylane.spark.spark_session import session
    from keylane.spark.topic import register

__all__ = ["EpochFigures", "EpochListener", "register", "session"]

_MODULES = {
    "EpochFigures": "keylane.spark.listener",
    "EpochListener": "keylane.spark.listener",
    "register": "keylane.spark.topic",
    "session": "keylane.spark.spark_session",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found
