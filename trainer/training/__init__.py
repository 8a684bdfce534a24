"""What ``python -m trainer`` adds to Lightning: phases, their callback, dashboards, benchmarks."""
