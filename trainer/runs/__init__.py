"""Runs: rules between keys, phases and controls, directories, metrics, and models by name."""
