"""GPU memory over several hosts: kernels inside a host, pinned memory and the network between hosts."""
