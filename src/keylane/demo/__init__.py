"""The demo: a chat pipeline with failures, and the report that judges it."""
