"""What is decided on a machine, as NCCL decides it: channel search, rings and trees over nodes, tuning (``plan.make_plan`` does it all)."""
