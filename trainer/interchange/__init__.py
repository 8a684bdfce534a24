"""Weights and configurations of other projects: Hugging Face, export."""
