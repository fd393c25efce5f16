"""The CUDA executor: kernels compiled at run time for one rank count, data type, operator and algorithm, and what launches them."""
