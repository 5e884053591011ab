"""The folder of a run: files, checkpoints, tables and locks."""
