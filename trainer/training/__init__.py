"""Training with Lightning: module, optimizers, strategies, and callbacks."""
