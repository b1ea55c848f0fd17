"""What machines there are, and how they are reached."""
