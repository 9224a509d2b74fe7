"""What several unit tests need."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Keep Keylane's log out of a test whose app fails on purpose."""
    caplog.set_level(logging.CRITICAL, "keylane")
