"""Calls on GPU memory without the interpreter. Compiled together:

- ``call``: the builtins, one a kind of operation; the rest is what they are made of
- ``views``: looks at an array, by its type: ``tensors`` (PyTorch's), ``arrays`` (CuPy's), ``foreign`` (others, by their protocols)
- ``streams``: the stream of a call, and that it follows the one before
- ``rows``: from arguments to a launch in the table, of collectives and messages; ``moves``: collectives that are lists of messages;
  ``reductions``: reduce_scatter_v; ``shapes``: messages whose sizes are new
- ``groups``: what is noted between the beginning and the end of a group

Python's side: ``table`` enters launches, ``kinds`` types of arrays.  ``layout`` are the words that both know.
"""

#: modules outside this package whose functions end up in compiled code
SOURCES = ("miraccl.executor.cuda.warp_queues", "miraccl.executor.cuda.message_collectives")
