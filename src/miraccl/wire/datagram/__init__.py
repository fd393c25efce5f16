"""Datagram transport as state machines: packets, acknowledgements, recovery, paths, congestion
control.

Integers only (nanoseconds, bytes, fractions of 2^16), no clock, no sockets: the simulated fabric,
the tests and the compiled engine run the same decisions bit for bit.  ``flow`` is where to begin.
"""
