"""Turns machines into a cluster that trains: facts in, a plan of what is missing, do it, look again."""
