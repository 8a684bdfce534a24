"""The decoder: attention and its backends, loss, cache, generation."""
