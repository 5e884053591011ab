"""Checks of client modules against aggregators: before the first round, and in every round."""
