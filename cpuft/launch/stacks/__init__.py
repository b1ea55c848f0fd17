"""Why does it hang: the ranks of a run are looked at where they are, and the one that holds up the others is named."""
