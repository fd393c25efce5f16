"""miraccl: collective communication between processes, hosts and GPUs that explains every decision it makes."""

__version__ = "0.1.0"
