"""RULER (Hsieh et al. 2024, arXiv 2404.06654): thirteen tasks that are made up on the spot.

Eight searches for needles, one chase of a variable through assignments, two counts of words and two
sets of questions to paragraphs, asked in the words and with the numbers of needles, hops and words
of the benchmark's own programs (github.com/NVIDIA/RULER, template ``base``). The trials are not the
benchmark's: they are drawn by another order of random numbers, haystacks of essays are made of the
caller's documents instead of Paul Graham's, and, unless the setting ``published`` asks for the
benchmark's way, each trial has a haystack that fills its length and an order of its own. Figures of
others are comparable in what they measure, not to the last digit.

lm-eval has the tasks too, and downloads what they need: ``+evaluation=harness
evaluation.tasks=[ruler]``.
"""
