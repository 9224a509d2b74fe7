"""Handler arguments and results: signatures, payloads, batches, fields, encoding."""
