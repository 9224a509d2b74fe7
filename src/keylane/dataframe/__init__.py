"""Lanes over any DataFrame: `ordered`."""
