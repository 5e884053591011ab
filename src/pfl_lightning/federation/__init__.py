"""A federation's rounds, their evaluation, and what its checkpoints hold."""
