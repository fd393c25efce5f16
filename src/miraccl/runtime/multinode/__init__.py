"""GPU memory over several nodes: kernels inside a node, pinned memory and network between nodes."""
