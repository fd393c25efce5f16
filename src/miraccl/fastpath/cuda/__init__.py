"""Fast path for calls on GPU memory: repeated calls run without the interpreter.

A fast call is a builtin with a compiled body. It reads the arrays, finds the launch in a table and
calls cuLaunchKernelEx. Compiled together:

- ``call``: the builtins, one per kind of operation
- ``views``: reads an array by its type, with ``tensors`` (PyTorch), ``arrays`` (CuPy) and
  ``foreign`` (others, by their protocols)
- ``streams``: stream of a call and its order after the previous operation
- ``lookup``: from arguments to a launch in the table, for collectives and messages
- ``message_ops``: collectives that are lists of messages; ``reductions``: reduce_scatter_v
- ``templates``: messages whose sizes are new
- ``groups``: calls collected between begin and end of a group

Python side: ``table`` enters launches, ``foreign_types`` types of arrays. ``layout`` defines the
records that both sides share.
"""

#: Modules outside this package whose functions are compiled as well.
SOURCES = (
    "miraccl.executor.cuda.fast_call_layout",
    "miraccl.executor.cuda.warp_queues",
    "miraccl.executor.cuda.message_collectives",
)
