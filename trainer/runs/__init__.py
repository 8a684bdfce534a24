"""A run on disk and among its processes: configuration, directory, checkpoints, metrics, ranks."""
