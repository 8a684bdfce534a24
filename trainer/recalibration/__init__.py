"""The drop of an encoding: its configuration, schedule and effect."""
