"""A cluster of servers that are reached over ssh."""
