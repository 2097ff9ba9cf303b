"""autopart: a compiler that places a PyTorch training step on many devices."""
