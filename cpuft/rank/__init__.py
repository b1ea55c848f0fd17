"""The first code on every rank: find out its rank, check that it is where the plan put it, and run the worker."""
