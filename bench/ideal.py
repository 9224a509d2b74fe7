"""``python -m bench.ideal``: what the chat workload takes by arithmetic, with engines and brokers that cost nothing.

Messages of a key wait for each other, and 10% fail at first. Keylane's third stage fails after its sleep and runs again
alone, after a wait drawn from 0 to 100 ms; the peers' handler fails at its end and runs again as a whole, after a wait
drawn from 50 to 100 ms.
``--overhead`` is what either adds to every message, in ms.
"""

from __future__ import annotations

import argparse
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_STAGES = (5, 20, 65, 10)
_WAIT_MS = 100.0
_KEYS, _RATE, _FAIL = 2_000, 2_000, 0.1


def latencies(*, resumes: bool, overhead: float = 0.0, n: int = 200_000, seed: int = 1) -> list[float]:
    """Milliseconds from when each of ``n`` messages was due to its end, sorted."""
    rng = random.Random(seed)
    free: dict[int, float] = {}
    found = []
    for number in range(n):
        due, key = 1000 * number / _RATE, rng.randrange(_KEYS)
        fails, drawn = rng.random() < _FAIL, rng.random()
        takes = sum(_STAGES) + overhead
        if fails:
            takes += (
                drawn * _WAIT_MS + max(_STAGES) if resumes else (0.5 + drawn / 2) * _WAIT_MS + sum(_STAGES)
            )
        free[key] = max(due, free.get(key, 0.0)) + takes
        found.append(free[key] - due)
    return sorted(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print p50 and p99 of both, and their ratio."""
    parser = argparse.ArgumentParser(prog="python -m bench.ideal", description=__doc__.splitlines()[0])
    parser.add_argument("--overhead", type=float, default=0.0, help="ms for every message (%(default)g)")
    given = parser.parse_args(arguments)
    p99 = {}
    for name, resumes in (("keylane", True), ("a peer", False)):
        found = latencies(resumes=resumes, overhead=given.overhead)
        p99[name] = found[len(found) * 99 // 100]
        print(f"{name}: p50 {found[len(found) // 2]:.0f} ms, p99 {p99[name]:.0f} ms")
    print(f"p99 of keylane / a peer: {p99['keylane'] / p99['a peer']:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
