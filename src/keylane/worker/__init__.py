"""One worker process: session, restore, commit, command executor, refetch."""
