"""Measures what limits a large app, on one machine."""
