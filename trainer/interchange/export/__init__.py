"""Directories that transformers loads: which architecture, which weights, and the proof."""
