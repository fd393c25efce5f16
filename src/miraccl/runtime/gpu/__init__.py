"""Communicator for GPU memory on one host, with the parts that the multi-node one shares."""
