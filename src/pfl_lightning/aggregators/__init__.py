"""The server side: what combines the updates of a round, and leaves each client's next payload."""
