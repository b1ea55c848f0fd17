"""A run, from options to results."""
