"""Clusters of queries and keys, and how the rotation disperses them (RoPE-ID)."""
