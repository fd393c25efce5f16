"""Constants of ``kernels.extents`` that Python needs too, without importing Numba."""

RADIX_BITS = 11
RADIX = 1 << RADIX_BITS
#: Results below 0: -1 - 2 i for a local block out of range, -2 - 2 i for a remote one; and
#: OVERLAP - b for two blocks with the target b.
OVERLAP = -(1 << 40)
