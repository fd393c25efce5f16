"""Compiled fast paths from a Python call to a launch."""
