"""Lanes without I/O: the lane table, eviction, ordering modes, redrive, hot keys."""
