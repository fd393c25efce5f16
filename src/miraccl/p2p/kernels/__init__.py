"""Kernel sources of one-sided transfers: extents, copies within a host, and TCP streams."""

#: modules whose constants are part of the compiled code
SOURCES = ("miraccl.p2p.segment_layout", "miraccl.p2p.stream_layout")
