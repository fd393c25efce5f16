"""Proxies: host threads that advance network connections, and staging threads for GPU data.

``stream_engine`` is the compiled proxy for TCP, ``thread`` the one in Python for any
``driver.Driver``.
"""

from miraccl.proxy.thread import Proxy

__all__ = ["Proxy"]
