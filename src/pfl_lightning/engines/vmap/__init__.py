"""The vectorised engine: many clients of one architecture in one computation."""
