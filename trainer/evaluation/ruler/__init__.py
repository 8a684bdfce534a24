"""RULER (Hsieh et al. 2024, arXiv 2404.06654): thirteen tasks that are made up on the spot.

Eight searches for needles, one chase of a variable through assignments, two counts of words and two
sets of questions to paragraphs, asked in the words and with the settings of the benchmark's own
programs (github.com/NVIDIA/RULER, template ``base``), so that figures can be compared. Haystacks of
essays are made of the caller's documents instead of Paul Graham's.

lm-eval has the tasks too, and downloads what they need: ``+evaluation=harness
evaluation.tasks=[ruler]``.
"""
