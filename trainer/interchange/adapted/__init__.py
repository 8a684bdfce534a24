"""Models computed by transformers, behind our interface for analyses and evaluations."""
