"""Workflows: what each command does from start to end, one file per command."""
