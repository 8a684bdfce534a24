"""Attention geometry: what queries and keys look like before and after the rotation, and why."""
