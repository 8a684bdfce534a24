"""RULER (Hsieh et al. 2024, arXiv 2404.06654): thirteen generated tasks.

These are eight searches for needles, one chase of a variable through assignments, two counts of
words, and two sets of questions about paragraphs. Wording and numbers of needles, hops and words
are those of the benchmark's own programs (github.com/NVIDIA/RULER, template ``base``). The trials
are not the benchmark's: random numbers are drawn in another order, and essay haystacks consist of
the caller's documents instead of Paul Graham's. Each trial's haystack fills its length and has its
own order, unless the setting ``published`` requests the benchmark's way. Published scores are
therefore comparable, but not to the last digit.

lm-eval has the tasks, too, and downloads what they need: ``+evaluation=harness
evaluation.tasks=[ruler]``.
"""
