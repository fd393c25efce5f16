"""What the GPU kernels' threads say to one another, as small programs whose every interleaving is looked at.

``program`` has cells of memory and what threads do with them, ``search`` goes through all orders, ``order`` proves the same for sizes
that no search can go through. ``shots``, ``ring``, ``chain``, ``trees``, ``steps``, ``rows`` and ``chunks`` are the kernels,
``staged`` is copy engines.
"""
