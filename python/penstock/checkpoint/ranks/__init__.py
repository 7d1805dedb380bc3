"""Communication of a job's ranks: messages, waits, and a common verdict."""
