"""Description of a machine: topology files, detection, system graph and paths.

``load.load_topology`` returns a tree, ``analyse.analyse_topology`` a ``Topology`` with its
``records.System`` and ``records.PathTable``; ``queries`` answers the questions of planning and
transports, ``explain`` gives reasons. Decisions are those of NCCL 2.28. No GPU, network or other
rank is needed.
"""
