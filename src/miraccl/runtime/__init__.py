"""A communicator on one rank: connections, core, progress, memory, lifecycle."""
