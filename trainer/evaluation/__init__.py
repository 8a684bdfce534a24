"""What a checkpoint can retrieve and predict, and how far."""
