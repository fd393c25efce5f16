"""PyTorch backend ``miraccl`` for ``torch.distributed``, for tensors in CPU and GPU memory.

Usage: ``import miraccl.torch``, then ``torch.distributed.init_process_group("miraccl")``.

``import miraccl`` alone does not import torch.  The guide's PyTorch page lists the supported
operations and types.
"""

from __future__ import annotations

import os

from miraccl.bootstrap.stacks import add_library
from miraccl.errors import MissingDependency

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingDependency(
        "miraccl.torch needs PyTorch", hint="pip install 'miraccl[torch]'"
    ) from error

if not dist.is_available():
    raise MissingDependency(
        "this build of PyTorch has no torch.distributed",
        hint="install a build with USE_DISTRIBUTED=1",
    )

from miraccl.torch.dynamo_disable import disable_dynamo
from miraccl.torch.failures import BackendError
from miraccl.torch.functional import register
from miraccl.torch.message_work import TransferWork
from miraccl.torch.process_group import ProcessGroupMiraccl
from miraccl.torch.rendezvous import SCHEME, handle
from miraccl.torch.sparse import sparse_hook
from miraccl.torch.start import create
from miraccl.torch.streams import StreamWork
from miraccl.torch.tensors import DEVICES, NAME
from miraccl.torch.work import Work
from miraccl.torch.wrapped import install

__all__ = ["NAME", "BackendError", "ProcessGroupMiraccl", "create", "sparse_hook"]

add_library(os.path.dirname(torch.__file__))
if NAME.upper() not in dist.Backend._plugins:
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=list(DEVICES))
    dist.register_rendezvous_handler(SCHEME, handle)
    parts = (cls for cls in ProcessGroupMiraccl.__mro__ if cls.__module__.startswith(__name__))
    disable_dynamo(*parts, Work, TransferWork, StreamWork, functions=[*install(), *register()])
