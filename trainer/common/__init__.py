"""Errors as values, files, progress and checked values, used by every room."""
