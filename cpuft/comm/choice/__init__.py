"""Which backend is fastest here: measured, and remembered."""
