"""Weights and configurations of others: Hugging Face, GGUF, export."""
