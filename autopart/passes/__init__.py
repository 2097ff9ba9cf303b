"""The passes, in the order of processing: normalise, segment, shard, split, schedule, emit, verify. One file a pass."""
