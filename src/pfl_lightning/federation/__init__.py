"""The rounds of a federation, their evaluation and their checkpoints."""
