"""Ordered processing of any DataFrame: ``ordered``."""
