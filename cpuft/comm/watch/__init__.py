"""Deadlines, and who is alive."""
