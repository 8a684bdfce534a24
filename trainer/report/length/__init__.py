"""What is written and drawn of a length evaluation: statistics, tables, figures, the page."""
