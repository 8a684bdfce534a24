"""Pages, tables, figures and judged claims made from results; nothing below imports it."""
