"""First thing on every rank: who am I, am I where the plan put me; then the worker."""
