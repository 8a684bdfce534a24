"""Rotary offset features: slow pairs with large means at a fixed angle."""
