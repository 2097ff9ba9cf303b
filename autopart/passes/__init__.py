"""The passes, in the order of processing: normalise, segment, split, schedule, emit, verify. One file a pass."""
