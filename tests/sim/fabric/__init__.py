"""Tests of the packet-level fabric."""
