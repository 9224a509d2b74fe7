"""What every test gets: property tests that are repeatable, unless they are asked to explore."""

from __future__ import annotations

import os

from hypothesis import settings

# A run of the suite gives the same answer for the same tree. `make soak` looks for new cases.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("KEYLANE_HYPOTHESIS", "repeatable"))
