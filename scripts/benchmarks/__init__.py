"""Programs that measure cpuft against others, and long checks; scripts/bench-* and scripts/check-* start them."""
