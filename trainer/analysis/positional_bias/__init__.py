"""Positional bias of heads, its gradients, and what a rescaling does to it (DroPE)."""
