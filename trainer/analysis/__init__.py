"""Analyses of attention: the geometry of queries and keys before and after the rotation."""
