"""The collector is the task's while it runs and Python's again afterwards: Spark uses the process for more."""

from __future__ import annotations

import gc
import weakref

import pytest

from keylane.engine.garbage import own_collector


class Knot:
    def __init__(self) -> None:
        self.me = self


def test_the_collector_is_given_back_whatever_happens() -> None:
    assert gc.isenabled()

    def fails_inside() -> None:
        with own_collector():
            assert not gc.isenabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails_inside()
    assert gc.isenabled()


def test_garbage_skips_only_objects_from_before_the_first_task() -> None:
    with own_collector():
        frozen = gc.get_freeze_count()
        assert frozen > 1000, "the modules"
    for _ in range(2):
        kept = [Knot() for _ in range(100)]
        with own_collector():
            assert gc.get_freeze_count() <= frozen
        gone = weakref.ref(kept.pop())
        kept.clear()
        gc.collect()
        assert gone() is None


def test_garbage_of_the_epoch_before_is_not_kept_for_ever() -> None:
    gc.disable()
    try:
        gone = weakref.ref(Knot())
        assert gone() is not None
        with own_collector():
            assert gone() is None
    finally:
        gc.enable()
