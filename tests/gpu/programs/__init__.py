"""Random programs: many sequential and concurrent operations, every result compared with NumPy's.

    python -m tests.gpu.programs --ranks 4 --seeds 200 --budget 100   # GPU, half of them by PyTorch
    python -m tests.gpu.programs --device cpu --ranks 3 --seeds 20
    python -m tests.gpu.programs --device emulated --seeds 20         # without a GPU or PyTorch
    python -m tests.gpu.programs --first 137 --seeds 1 --show         # one seed, with its steps

``draw`` generates a program from a seed, a list of ``records``, the same on every rank. ``model``
computes the memory of every rank after each step. ``rank`` runs the program on memory and streams
of ``memory``, by the calls of ``miraccl_calls`` or ``torch_calls`` (PyTorch's, on any backend:
``--backend gloo`` and ``--backend nccl`` test the tester). ``orchestrator`` starts the ranks and
ends them when a program takes too long.
"""
