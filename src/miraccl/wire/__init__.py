"""Protocols as machines without sockets, clocks or threads: what arrives and what time it is goes
in, what is to be sent comes out.
"""
