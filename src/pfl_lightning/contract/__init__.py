"""What client modules and aggregators promise one another, checked before the first round and in every round."""
