"""The settings that the app's state topic is created with."""

from __future__ import annotations

from keylane.kafka import cluster
from keylane.kafka.transactional_writer import PROGRESS_CHARACTERS_MAX


def test_state_topic_takes_the_largest_record() -> None:
    assert int(cluster.STATE_CONFIG["max.message.bytes"]) > PROGRESS_CHARACTERS_MAX + 10_000, (
        "whatever the broker's own limit is"
    )
    assert cluster.STATE_CONFIG["cleanup.policy"] == "compact"
