"""Models that transformers computes, as analyses and evaluations ask for them."""
