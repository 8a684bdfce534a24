"""Frequency entropy of rotary pairs, and perplexity with extreme pairs attenuated."""
