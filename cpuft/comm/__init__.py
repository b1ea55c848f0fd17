"""Communication between ranks: the torch.distributed backends `ccl` (oneCCL), `mpi` (Intel MPI, MPICH) and `gloo`.

Importing this package makes `torch.distributed.init_process_group("ccl")` and `("mpi")` work; only that call loads
their libraries. A watchdog enforces the timeout of all operations.
"""

from cpuft.comm.registration import BACKENDS, exit_process, register_backends, start
from cpuft.comm.watchdog import take_traffic

__all__ = ["BACKENDS", "exit_process", "register_backends", "start", "take_traffic"]

register_backends()
