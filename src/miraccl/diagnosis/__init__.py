"""Faults: mismatch and deadlock detection, fault propagation, reports."""
