"""Measurements of the source code: ``make language`` and ``make structure``."""
