"""What ends a measurement."""

from __future__ import annotations


class BenchError(Exception):
    """In one line: what went wrong and where to look."""
