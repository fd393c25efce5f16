"""Interfaces of other libraries over miraccl's own, for programs that were written for them."""
