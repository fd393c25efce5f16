"""CUDA executor: kernels specialised at run time by rank count, type, operator and algorithm."""
