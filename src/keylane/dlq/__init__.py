"""Dead letters: record, headers, writer, reader and local spool."""
