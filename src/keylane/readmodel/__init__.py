"""Read models: tables built from events, in SQLite or on Spark."""
