"""Ways between ranks: shared memory, TCP, memory of GPUs. ``base`` says what a transport is; ``comm.fabric`` chooses one for each pair."""
