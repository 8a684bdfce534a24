"""Positional bias of heads, its gradients, and the effect of a rescaling on it (DroPE)."""
