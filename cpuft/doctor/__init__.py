"""Checks of a cluster with stable codes: each finding has its evidence, its cause and the next move."""
