"""One file per built-in algorithm; the file's name is the algorithm's. ``catalog`` imports them all on first use."""
