"""Records -> speedup tables. Reads nothing but records."""
