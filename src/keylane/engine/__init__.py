"""The engine: one asyncio loop per task that drives the core. Knows stages and lanes, neither Kafka nor Spark."""
