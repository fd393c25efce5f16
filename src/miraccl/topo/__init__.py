"""What the machine is: topology files, detection, the system graph and the paths in it, with NCCL 2.28's decisions.

``load.load_topology`` gives a tree, ``analyse.analyse_topology`` a ``Topology`` with its ``records.System`` and ``records.PathTable``;
``queries`` answers what planning and transports ask of them, ``explain`` says why. Needs no GPU, no network and no other rank.
"""
