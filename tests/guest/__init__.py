"""Tests on the RDMA devices of a guest's kernel; ``make test-guest`` runs them."""
