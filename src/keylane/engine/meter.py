"""How long messages take: measured on a sample of those that are done, so that the rest pay next to nothing."""

from __future__ import annotations

from random import random
from typing import TYPE_CHECKING

from keylane.core.telemetry import Histogram

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.engine.delivery import Delivery

ENOUGH = 500
"""Messages that are measured between two ticks, about: a microsecond each."""


class Meter:
    """Of one task; used on its loop only. All are measured while they are few, then one of ``stride``, at random."""

    def __init__(self) -> None:
        self.latency = Histogram()
        self.processing = Histogram()
        self.stride = 1
        self._skip = 0  # messages until the next that is measured
        self._taken = 0

    def done(self, deliveries: Sequence[Delivery]) -> None:
        """These are done. A sample counts for as many as it stands for: what is counted is right on the average."""
        skip = self._skip - len(deliveries)
        if skip >= 0:
            self._skip = skip
        else:
            self._measure(deliveries)

    def tick(self) -> None:
        """A second or so has passed."""
        if self._taken * 2 < ENOUGH and self.stride > 1:
            self.stride //= 2
        self._taken = 0

    def _measure(self, deliveries: Sequence[Delivery]) -> None:
        while len(deliveries) > ENOUGH * self.stride:
            self.stride *= 2
        stride, index = self.stride, self._skip
        while index < len(deliveries):
            delivery = deliveries[index]
            if not delivery.redriven:  # its timestamp is of another time
                if delivery.started:
                    self.processing.add(delivery.finished - delivery.started, stride)
                sent = delivery.timestamp
                if sent is not None:
                    self.latency.add(delivery.finished - sent / 1000, stride)
            self._taken += 1
            # Not every n-th: keys that take turns would all be met, or never.
            index += 1 if stride == 1 else 1 + int(random() * (2 * stride - 1))
        self._skip = index - len(deliveries)
        if self._taken > ENOUGH:
            self._taken = 0
            self.stride *= 2
