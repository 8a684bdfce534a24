"""What was measured as plain data, tables, figures and pages, and sentences about it."""
