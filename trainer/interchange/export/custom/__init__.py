"""Code that goes with models no architecture of transformers can hold; copied, never imported."""
