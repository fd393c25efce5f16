"""Schedules on CPU ranks: compiled loops over flat arrays."""
