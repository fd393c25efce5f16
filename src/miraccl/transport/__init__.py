"""Transports between ranks: shared memory, TCP, threads of one process, and mappings of GPU memory.

``base`` is the contract, ``registry`` the table from which the transport of each pair is chosen.
"""
