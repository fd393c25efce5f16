"""The host thread that advances network connections; see ``proxy.thread``."""

from miraccl.proxy.thread import Proxy

__all__ = ["Proxy"]
