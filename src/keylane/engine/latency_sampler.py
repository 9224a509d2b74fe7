"""Latency sampler: measures how long messages take, on a random sample of those that are done."""

from __future__ import annotations

from random import random
from typing import TYPE_CHECKING

from keylane.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.engine.delivery import Delivery

SAMPLES_PER_TICK = 500
"""The approximate number of messages measured between two ticks."""


class LatencySampler:
    """The latencies of one task: of all messages while they are few, then of about one in ``stride``, at random.

    Used only on the task's loop.
    """

    def __init__(self) -> None:
        self.latency = Histogram()
        self.processing = Histogram()
        self.stride = 1
        self._skip = 0  # messages until the next measured one
        self._taken = 0

    def done(self, deliveries: Sequence[Delivery]) -> None:
        """These messages are done. Each sample counts ``stride`` times, so that the totals are right on average."""
        skip = self._skip - len(deliveries)
        if skip >= 0:
            self._skip = skip
        else:
            self._measure(deliveries)

    def tick(self) -> None:
        """A second or so has passed."""
        if self._taken * 2 < SAMPLES_PER_TICK and self.stride > 1:
            self.stride //= 2
        self._taken = 0

    def _measure(self, deliveries: Sequence[Delivery]) -> None:
        while len(deliveries) > SAMPLES_PER_TICK * self.stride:
            self.stride *= 2
        stride, index = self.stride, self._skip
        while index < len(deliveries):
            delivery = deliveries[index]
            if not delivery.redriven:  # its timestamp is from its first run
                if delivery.started:
                    self.processing.add(delivery.finished - delivery.started, stride)
                sent = delivery.timestamp
                if sent is not None:
                    self.latency.add(delivery.finished - sent / 1000, stride)
            self._taken += 1
            # A random step: with a fixed one, keys that alternate would be sampled always or never.
            index += 1 if stride == 1 else 1 + int(random() * (2 * stride - 1))
        self._skip = index - len(deliveries)
        if self._taken > SAMPLES_PER_TICK:
            self._taken = 0
            self.stride *= 2
