"""Checks of a cluster's hosts with stable codes. Each finding has its evidence, its cause and the next step."""
