"""The collector is the task's while it runs and Python's again afterwards: Spark uses the process for more."""

from __future__ import annotations

import gc
import weakref

import pytest

from keylane.engine.collector import own_collector


class Knot:
    def __init__(self) -> None:
        self.me = self


def test_the_collector_is_given_back_whatever_happens() -> None:
    assert gc.isenabled()
    before = gc.get_freeze_count()

    def fails_inside() -> None:
        with own_collector():
            assert not gc.isenabled()
            assert gc.get_freeze_count() > before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails_inside()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_garbage_of_the_epoch_before_is_not_kept_for_ever() -> None:
    gc.disable()
    try:
        gone = weakref.ref(Knot())
        assert gone() is not None
        with own_collector():
            assert gone() is None
    finally:
        gc.enable()
