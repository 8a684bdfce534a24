"""Evaluation of checkpoints: what they retrieve and predict, and at which lengths."""
