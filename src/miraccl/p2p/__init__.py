"""One-sided transfers between processes that need not share a communicator.

An ``Agent`` registers memory, hands out descriptors of it, and reads and writes the memory of other
agents. ``docs/design/transfers.md`` describes registration, methods and the protocol.
"""
