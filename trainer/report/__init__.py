"""What a run showed: the numbers as data, a terminal table, figures, an HTML page, and sentences
that hold them against the papers' observations."""
