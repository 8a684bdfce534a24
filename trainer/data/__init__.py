"""Text, tokenizer, packed tokens, needles and the order of samples."""
