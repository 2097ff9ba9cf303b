"""Code generation: the staged step as Python text, and what can be read back from that text."""
