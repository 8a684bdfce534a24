"""What a drop does, when it happens, and what it changed."""
