"""Generators of documentation pages and blocks, from the code and from bench/results."""
