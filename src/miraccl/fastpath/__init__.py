"""Compiled entry points from a Python call to a launch."""
