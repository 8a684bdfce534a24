"""The decoder: attention and its backends, key-value cache, loss."""
