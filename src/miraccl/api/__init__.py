"""Public surface: communicators, their operations, and initialization."""
