"""Algorithm selection: from a request to a plan, with its explanation."""
