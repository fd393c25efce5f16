"""Built-in algorithms, one module each, named like the algorithm; imported by ``catalog`` on first
use.
"""
