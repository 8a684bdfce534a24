"""What happens beside the training step."""
