"""miraccl's transports as a network plugin of NCCL.

``export()`` in a PyTorch or JAX process makes NCCL there move its data between hosts over the
transport that ``MIRACCL_NET`` names.
"""

from __future__ import annotations

from miraccl.nccl_plugin.export import EXPORTED, NcclPlugin, export

__all__ = ["EXPORTED", "NcclPlugin", "export"]
