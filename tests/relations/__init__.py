"""Relations between results that hold for every field, every control, every phase and every state.

A test here names no field: it generates a change of each from the schema, so that a new field is
tested, or has to be listed with a reason.
"""
