"""``miraccl perf``: the table of nccl-tests, for every collective, on own or given ranks, beside a peer."""
