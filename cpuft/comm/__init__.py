"""Communication between ranks: c10d backends `ccl` (oneCCL), `mpi` (Intel MPI, MPICH) and `gloo`, with deadlines.

Importing this package makes `torch.distributed.init_process_group("ccl")` and `("mpi")` work. Nothing is loaded
before that call, so the import needs neither oneCCL nor mpi4py.
"""

from cpuft.comm.group.registration import BACKENDS, register_backends, start
from cpuft.comm.group.session import leave, take_traffic

__all__ = ["BACKENDS", "leave", "register_backends", "start", "take_traffic"]

register_backends()
