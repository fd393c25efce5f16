"""``miraccl perf``: the table of nccl-tests for every collective, with an optional peer library."""
