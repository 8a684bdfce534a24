"""Matrix entropy of heads (DoPE), and their attention on a needle."""
