"""Communicators: what a call means, which plan it runs, how it fails. ``communicator`` is where to begin; ``device`` is for GPU memory."""
