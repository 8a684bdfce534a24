"""What ``python -m trainer`` adds to Lightning: phases, a callback, measurements, dashboards."""
