"""Executor of schedules on CPU ranks: compiled loops over flat arrays."""
