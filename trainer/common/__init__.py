"""Errors, files, progress and words, which every room uses."""
