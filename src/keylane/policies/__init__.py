"""Policies without I/O: retry, breaker, failure guard, deduplication, version ordering, error classification."""
