"""Factor rules: which loops an operator has, and which dims of its operands and results they index."""
