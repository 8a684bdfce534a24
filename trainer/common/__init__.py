"""Errors as values, checked values, files, locks, processes and progress, used by every room."""
