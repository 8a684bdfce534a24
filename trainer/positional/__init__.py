"""Positional encodings as data: spectra, layouts over layers and heads, rotation."""
