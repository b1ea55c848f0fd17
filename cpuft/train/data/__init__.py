"""Training data: examples are read, tokenised once and dealt to the ranks."""
