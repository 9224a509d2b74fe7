"""The pure core: lanes, retry, watermark, progress. No I/O, no clocks of its own: callers pass ``now``."""
