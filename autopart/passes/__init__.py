"""The passes, in the order of processing: normalise, segment, recompute, shard, split, schedule,
split_backward, emit, verify. One file a pass; the others hold what a pass asks."""
