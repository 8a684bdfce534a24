"""The Lightning module, optimizers, schedules, checkpoints and callbacks."""
