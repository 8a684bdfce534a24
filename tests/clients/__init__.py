"""Programs of others that run the drop, each against a reference that uses nothing of ours."""
