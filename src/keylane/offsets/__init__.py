"""Offsets without I/O: watermarks, offset sets, commit metadata, slots, range progress, assignment."""
