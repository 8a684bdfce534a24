"""Needle-in-a-haystack tasks in natural language."""
