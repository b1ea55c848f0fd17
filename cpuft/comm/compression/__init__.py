"""Compression of what ranks send each other: one module per compression, and `table.py`, which registers them."""
