"""The audit: proves from an app's ledger what the app promises."""
