"""The decoder: attention and its backends, cache, loss."""
