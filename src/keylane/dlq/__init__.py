"""Dead letters: record, headers, writer, reader, spool."""
