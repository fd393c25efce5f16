"""Random programs: many operations one after another and beside one another, every result compared with NumPy's.

    python -m tests.gpu.programs --ranks 4 --seeds 200 --budget 100            # GPU memory, half of the programs through PyTorch
    python -m tests.gpu.programs --device cpu --ranks 3 --seeds 20
    python -m tests.gpu.programs --device emulated --seeds 20                  # without a GPU, through miraccl's calls alone
    python -m tests.gpu.programs --first 137 --seeds 1 --show                  # one seed again, with its steps

``draw`` makes a program from a seed, a list of ``records``, the same on every rank.  ``model`` says what every rank's memory holds after
each step.  ``rank`` runs the program, on memory and streams of ``place``, with the calls of ``own`` (miraccl's) or of ``torch_calls``
(PyTorch's, on any backend: ``--backend gloo`` and ``--backend nccl`` try the tester itself).  ``conductor`` starts the ranks, and ends
them when a program takes too long.
"""
