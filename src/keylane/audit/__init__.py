"""Audit of a ledger: it proves that an app kept its promises, or shows where it did not."""
