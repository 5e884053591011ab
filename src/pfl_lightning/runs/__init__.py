"""A run's folder: its files, checkpoints and tables, and how it is stopped."""
