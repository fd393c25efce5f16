"""Models of the kernels' communication, small programs whose interleavings are all explored.

``program`` has memory cells and thread operations, ``search`` explores all orders, ``order`` proves
the same for sizes that no search can explore. ``shots``, ``ring``, ``chain``, ``trees``, ``steps``,
``rows`` and ``chunks`` model the kernels, ``staged`` models copy engines.
"""
