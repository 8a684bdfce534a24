"""Drawing over matplotlib: panels of lines and points, histograms, heat maps; knows no results."""
