"""Attention sinks and massive norms of first tokens."""
