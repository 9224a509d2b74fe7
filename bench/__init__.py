"""Keylane measured beside its peers, on one machine, by one load generator: ``python -m bench``."""
