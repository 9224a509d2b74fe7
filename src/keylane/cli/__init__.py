"""The commands of ``keylane``: one module each, put together in ``main``."""
