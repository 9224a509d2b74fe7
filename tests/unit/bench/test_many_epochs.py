"""The verdict on what many epochs leave behind."""

from __future__ import annotations

import pytest

from bench.errors import BenchError
from bench.many_epochs import KindSample, collected, grown, growth, heap_growth, kind_of


def samples(kind: str, memory: list[float], threads: int = 5, files: int = 10) -> list[KindSample]:
    return [
        KindSample(at=10.0 * n, kind=kind, memory_mib=mib, threads=threads, files=files)
        for n, mib in enumerate(memory)
    ]


def others() -> list[KindSample]:
    return [one for kind in ("planner", "driver", "jvm") for one in samples(kind, [50.0] * 10)]


@pytest.mark.parametrize(
    ("program", "command", "kind"),
    [
        ("java", "java -cp … SparkSubmit", "jvm"),
        ("python3.11", "python -m pyspark.daemon pyspark.worker", "workers"),
        ("python3.11", "python -m pyspark.sql.streaming.python_streaming_source_runner", "planner"),
        ("python", "/venv/bin/python -m keylane run bench.many_epochs:app", "driver"),
        ("chmod", "chmod 644 offsets", None),
    ],
)
def test_processes_are_known_by_what_they_run(program: str, command: str, kind: str | None) -> None:
    assert kind_of(program, command) == kind


def test_steady_processes_pass() -> None:
    found = growth([*samples("workers", [100, 101, 100, 102, 101, 100, 101, 100, 102, 101]), *others()], 100)
    assert grown(found) == []


def test_memory_that_grows_is_named() -> None:
    found = growth([*samples("workers", [100.0 + 4 * n for n in range(10)]), *others()], 100)
    (problem,) = grown(found)
    assert problem.startswith("workers: memory_mib grew from")


def test_growth_of_the_warm_up_does_not_count() -> None:
    found = growth([*samples("workers", [10, 50, *[100.0] * 8]), *others()], 100)
    assert grown(found) == []


def test_process_that_was_not_seen_is_an_error() -> None:
    with pytest.raises(BenchError, match="recognised as its workers"):
        growth(others(), 100)


def gc(at: float, left: int) -> str:
    return f"[{at:.3f}s] GC(7) Pause Full (Diagnostic Command) {left + 60}M->{left}M(154M) 5.1ms\n"


def test_heap_is_read_from_the_log_of_collections() -> None:
    young = "[0.9s] GC(6) Pause Young (Normal) (G1 Evacuation Pause) 90M->80M(154M) 5.1ms\n"
    assert collected("[0.1s] Using G1\n" + young + gc(1.5, 41)) == [(1.5, 41.0)]


def test_heap_that_is_only_garbage_does_not_grow() -> None:
    """The smallest heap counts: between two large collections garbage piles up."""
    log = "".join(gc(10.0 * n, 60 + 5 * (n % 4)) for n in range(60))
    found = heap_growth(collected(log))
    assert found is not None
    assert found[2] == 0


def test_heap_that_grows_is_seen() -> None:
    found = heap_growth(collected("".join(gc(10.0 * n, 60 + n) for n in range(60))))
    assert found is not None
    assert found[2] > 0.3
    assert heap_growth([]) is None
