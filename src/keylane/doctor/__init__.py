"""Diagnosis of setup problems: probes collect facts, and judges turn them into findings."""
