"""Spark's master, as Keylane uses it."""

from __future__ import annotations

import pytest

from keylane.spark.spark_session import with_retries


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("local", "local[1,4]"),
        ("local[2]", "local[2,4]"),
        ("local[*]", "local[*,4]"),
        ("local[2,7]", "local[2,7]"),
        ("local[*, 1]", "local[*,1]"),
        ("spark://host:7077", None),
        ("local-cluster[2,1,1024]", None),
        ("yarn", None),
    ],
)
def test_a_failed_task_of_a_local_master_runs_again(given: str, used: str | None) -> None:
    assert with_retries(given) == used
