"""Telemetry: snapshot, sampler, sender, reader, aggregation, Prometheus, lag."""
