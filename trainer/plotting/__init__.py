"""Drawing primitives over matplotlib: lines, heat maps, points and bars; knows no results."""
