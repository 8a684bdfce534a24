"""Errors, checked values, files, processes and progress, used by every room."""
