"""Runs on disk and their processes: configuration, directory, checkpoints, metrics, ranks."""
