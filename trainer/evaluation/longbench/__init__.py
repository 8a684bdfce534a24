"""LongBench (Bai et al. 2023, arXiv 2308.14508): questions, summaries and code on real long texts.

The sixteen English tasks, asked in the words and scored by the rules of the benchmark's own
programs (github.com/THUDM/LongBench), for models without a chat template, so that figures can be
compared. RoPE-ID averages fourteen of them (App. A.8), the default here; DroPE reports four
(Table 2) and the mean of all (Table 8).
"""
