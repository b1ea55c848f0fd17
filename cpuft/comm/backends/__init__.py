"""The libraries that carry collectives: oneCCL, Intel MPI or MPICH, gloo."""
