"""Generators of the documentation: pages and blocks of pages that are computed from the code and from bench/results."""
