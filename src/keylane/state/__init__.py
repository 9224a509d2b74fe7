"""The state topic: record schemas, its reader, ownership and fencing, operator commands."""
