"""Make sure that the ranks of a user's script train one model together, and not each a copy of its own.

Libraries that look for GPUs first take a rank on a CPU for the only one, although they find RANK and WORLD_SIZE.
Several such ranks would train unconnected copies, write the same files, and end with exit code 0. Three things prevent
this:

- `list_patches` makes Accelerate, the Hugging Face Trainer (and what is built on it) and Lightning connect CPU ranks.
- A hook stops the first optimizer step of a rank that is in no process group of all ranks, and a later step of a rank
  whose process group has run no collective operation but barriers.
- `check_end` does the same at the end of the script.

A script whose ranks are meant to be independent is started with `cpuft launch --independent`.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from cpuft.errors import CpuftError
from cpuft.rank.diagnostics import read_operations

CHECK_VARIABLE = "CPUFT_CHECK_CONNECTED"
"""Environment variable that the launcher sets to 1 where ranks of a script must be connected. Without it nothing is
changed or checked: for a single rank, and with `--independent`."""

_CHECKED_STEPS = (2, 10, 50, 100)
"""Optimizer steps before which the rank notes whether its process group has exchanged data. The flight recorder of
torch keeps only the last 64 operations, so that one look at the end could miss those of the training."""
_LAST_CHECKED_STEP = _CHECKED_STEPS[-1]
_WITHOUT_DATA = ("barrier", "monitored_barrier")
"""Collective operations that exchange no data: libraries also run them where each rank trains by itself."""
_REMEDY = (
    "let the script form one process group (torch.distributed.init_process_group, Accelerate, the Hugging Face Trainer "
    "or Lightning), or start it with cpuft launch --independent if its ranks are meant to be independent"
)


class RefusedScriptError(CpuftError, RuntimeError):
    """A script does what cannot work on CPU ranks. It is a RuntimeError, too, as torch's own error would be."""


class ConnectionCheck:
    """Checks that this rank is connected with all others: that they form one process group, and exchange data in it.

    mpi4py's MPI_COMM_WORLD with all ranks counts as both.

    Parameters
    ----------
    size: number of ranks of the launch.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.group_size = 0
        """Size of the largest default process group that this process has formed."""
        self.steps = 0
        """Number of optimizer steps so far."""
        self.exchanged = False
        """Whether a collective operation other than a barrier was seen."""

    def note_group(self, size: int) -> None:
        """Note that a default process group of `size` ranks was formed. The largest one counts."""
        self.group_size = max(self.group_size, size)

    def before_step(self, *_: Any) -> None:
        """Count an optimizer step and check before it. Registered as a hook of all optimizers of torch.

        Raises RefusedScriptError: before the first step if no process group of all ranks was formed, and before step
        100 if no collective operation but barriers was seen.
        """
        self.steps += 1
        if self.steps == 1 and not self._is_joined():
            raise RefusedScriptError(self._describe("was stopped before its first optimizer step"))
        if self.steps in _CHECKED_STEPS:
            self._note_exchange()
        if self.steps == _LAST_CHECKED_STEP and self._is_unused():
            raise RefusedScriptError(self._describe_unused(f"was stopped before optimizer step {self.steps}"))

    def check_end(self) -> None:
        """Check at the end of a script that has run without an error.

        Raises RefusedScriptError: the ranks never formed a process group of all ranks, or made optimizer steps and
        exchanged no data.
        """
        self._note_exchange()
        if not self._is_joined():
            raise RefusedScriptError(self._describe("ended with an error"))
        if self.steps and self._is_unused():
            raise RefusedScriptError(self._describe_unused("ended with an error"))

    def _is_joined(self) -> bool:
        return self.group_size == self.size or count_mpi_ranks() == self.size

    def _is_unused(self) -> bool:
        """Return whether this rank has exchanged no data with the others."""
        return not self.exchanged and count_mpi_ranks() != self.size

    def _note_exchange(self) -> None:
        operations = None if self.exchanged else list_operations()
        self.exchanged = self.exchanged or operations is None or bool(operations.difference(_WITHOUT_DATA))

    def _describe(self, when: str) -> str:
        formed = f" (only one of {self.group_size})" if self.group_size else ""
        return (
            f"the script {when} because its {self.size} ranks are not connected: they formed no process group of "
            f"{self.size} ranks{formed}, so each rank works on a copy of its own. Next: {_REMEDY}"
        )

    def _describe_unused(self, when: str) -> str:
        return (
            f"the script {when} because its {self.size} ranks are not connected: they formed a process group, but "
            f"exchanged no gradients or parameters in it, so each rank trained a copy of its own. Next: wrap the model "
            f"in DistributedDataParallel or pass it to accelerator.prepare, or start the script with cpuft launch "
            f"--independent if its ranks are meant to be independent"
        )


def list_operations() -> set[str] | None:
    """Return the names of collective operations that this process has started, such as "all_reduce".

    They are all names that cpuft.comm knows and those of the last operations in torch's flight recorder. The set is
    empty if nothing was started. None: no name is known, and the recorder is off, missing, or cannot be read.
    """
    own = read_operations()
    names = {str(name) for name in own.get("names", ())} | {name for _, name in own.get("progress", {}).values()}
    module = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(module, "_dump_fr_trace_json", None)
    if not names and (dump is None or os.environ.get("TORCH_FR_BUFFER_SIZE") == "0"):
        return None
    try:
        entries = json.loads(dump(True, False)).get("entries", ()) if dump else ()
    except (ValueError, RuntimeError):
        return names or None
    return names | {str(entry["profiling_name"]).rpartition(":")[2] for entry in entries}


def count_mpi_ranks() -> int:
    """Return the number of ranks in MPI_COMM_WORLD; 0 if mpi4py.MPI is not imported, not initialized, or finalized."""
    mpi = sys.modules.get("mpi4py.MPI")
    return int(mpi.COMM_WORLD.Get_size()) if mpi and mpi.Is_initialized() and not mpi.Is_finalized() else 0


def refuse_nccl(backend: object) -> None:
    """Refuse NCCL as a script's only backend where there is no GPU. torch must have been imported.

    Parameters
    ----------
    backend: argument of init_process_group, such as "nccl"; a backend that also names gloo ("cpu:gloo,cuda:nccl") and
        None pass.

    Raises RefusedScriptError: the backend names nccl and not gloo, and torch finds no GPU.
    """
    torch = sys.modules["torch"]
    name = str(backend or "").lower()
    if "nccl" in name and "gloo" not in name and not torch.cuda.is_available():
        raise RefusedScriptError(
            f'the script calls init_process_group with the backend "{name}", which needs GPUs: use "gloo", or after '
            f'"import cpuft.comm" also "mpi" or "ccl"'
        )


def make_check(environ: Mapping[str, str]) -> ConnectionCheck | None:
    """Return the check for this rank; None with one rank, or with ranks that are meant to be independent.

    It is made if CPUFT_CHECK_CONNECTED is "1" and WORLD_SIZE is a whole number above 1.
    """
    size = environ.get("WORLD_SIZE", "1")
    return (
        ConnectionCheck(int(size))
        if environ.get(CHECK_VARIABLE) == "1" and size.isdecimal() and int(size) > 1
        else None
    )


def list_patches(check: ConnectionCheck) -> dict[str, Callable[[Any], None]]:
    """Return module name -> function that is called with the imported module and patches it.

    The modules belong to torch (optimizers call the check before each step), Accelerate, Transformers and Lightning
    (CPU ranks form one process group). Nothing is imported or patched by this call.
    """
    lightning = functools.partial(_use_all_ranks, size=check.size)
    return {
        "torch.optim.optimizer": functools.partial(_hook_optimizers, check=check),
        "accelerate.state": _join_on_cpus,
        "transformers.training_args": _train_on_cpus,
        "lightning.pytorch.trainer.connectors.accelerator_connector": lightning,
        "lightning.fabric.connector": lightning,
        "pytorch_lightning.trainer.connectors.accelerator_connector": lightning,
        "lightning_fabric.connector": lightning,
    }


def _hook_optimizers(optimizer: Any, check: ConnectionCheck) -> None:
    optimizer.register_optimizer_step_pre_hook(check.before_step)


def _join_on_cpus(state: Any) -> None:
    """Let Accelerate's PartialState form a process group of CPU ranks where there is no GPU, as if given cpu=True."""
    own = state.PartialState.__init__

    @functools.wraps(own)
    def make(self: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> None:
        own(self, cpu or not state.torch.cuda.is_available(), *args, **kwargs)

    state.PartialState.__init__ = make


def _train_on_cpus(training_args: Any) -> None:
    """Let the Trainer's arguments have use_cpu=True where there is no GPU: bf16 and the data loader depend on it."""
    own = training_args.TrainingArguments.__post_init__

    @functools.wraps(own)
    def complete(self: Any) -> None:
        if hasattr(self, "use_cpu") and not training_args.torch.cuda.is_available():
            self.use_cpu = True
        own(self)

    training_args.TrainingArguments.__post_init__ = complete


def _use_all_ranks(connector: Any, size: int) -> None:
    """Let `devices="auto"`, the default of Lightning's Trainer and Fabric, mean a process for each rank.

    On CPUs it means one process. Lightning multiplies `devices` by `num_nodes` (1 by default) and wants WORLD_SIZE.
    """
    for name in ("_AcceleratorConnector", "_Connector"):
        if found := getattr(connector, name, None):
            own = found._set_devices_flag_if_auto_passed

            @functools.wraps(own)
            def choose(self: Any, own: Callable[[Any], None] = own) -> None:
                if self._devices_flag == "auto" and "CPU" in type(self.accelerator).__name__:
                    self._devices_flag = max(1, size // self._num_nodes_flag)
                own(self)

            found._set_devices_flag_if_auto_passed = choose
