"""Shared machinery of all commands: composition, help, options and jobs."""
