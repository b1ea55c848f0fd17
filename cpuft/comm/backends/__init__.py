"""The backends: oneCCL, MPI and gloo."""
