"""The analyses by name: what each reads of a model, and the section that it writes about it."""
