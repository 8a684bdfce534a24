"""Unrope: train decoders with any positional encoding, drop it, and see how far they reach."""

__version__ = "0.3.0"
