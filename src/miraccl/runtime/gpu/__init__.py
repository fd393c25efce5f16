"""The communicator's side of GPU memory: ``communicator`` for the GPUs of one host, ``hosts`` for several."""
