"""The page about a model's attention: sections of text, formulas, figures and their numbers."""
