"""Export to directories that transformers loads: architecture, weights, and verification."""
