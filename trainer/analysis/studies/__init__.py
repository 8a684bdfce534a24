"""The interface of studies, and the catalogue of their names."""
