"""Make sure that the ranks of a user's script train one model together, and not each a copy of its own.

Libraries that look for GPUs first take a rank on a CPU for the only one, although they find RANK and WORLD_SIZE.
Several such ranks would train unconnected copies, write the same files, and end with exit code 0. Four things prevent
this:

- `list_patches` makes Accelerate, the Hugging Face Trainer (and what is built on it) and Lightning connect CPU ranks.
- A hook stops the first optimizer step of a rank that is in no process group of all ranks, and a later step of a rank
  whose process group has run no collective operation but barriers.
- A model in DistributedDataParallel must be called through it: `ConnectionCheck.before_step` compares the parameters
  of all ranks if optimizer steps follow each other without such a call.
- `check_end` does the same at the end of the script.

A script whose ranks are meant to be independent is started with `cpuft launch --independent`.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import weakref
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from cpuft.errors import CpuftError
from cpuft.rank.diagnostics import dump_recorder, read_operations
from cpuft.rank.process import format_steps
from cpuft.rank.world import CHECK_VARIABLE, parse_world

_CHECKED_STEPS = (2, 10, 50, 100)
"""Optimizer steps before which the rank notes whether its process group has exchanged data. The flight recorder of
torch keeps only the last 64 operations, so that one look at the end could miss those of the training."""
_LAST_CHECKED_STEP = _CHECKED_STEPS[-1]
_COMPARED_AFTER = (1, 2, 9, 49)
"""Numbers of missed calls of the wrapped model in a row, after which its parameters are compared."""
_WITHOUT_DATA = ("barrier", "monitored_barrier")
"""Collective operations that exchange no data: libraries also run them where each rank trains by itself."""
_REMEDY = (
    "let the script form one process group (torch.distributed.init_process_group, Accelerate, the Hugging Face Trainer "
    "or Lightning), or start it with cpuft launch --independent if its ranks are meant to be independent"
)

_OWN_PROCESSES = (
    "cpuft launch has started one process for each rank, so let the script start none: call the training function "
    "directly, with int(os.environ['RANK']) as its rank and int(os.environ['WORLD_SIZE']) as the number of ranks; or "
    "start the script with cpuft launch --np 1"
)
_REPLACED_PACKAGES = ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch", "torch_ccl")
"""Packages of scripts for Intel CPUs that have reached their end of life."""


class RefusedScriptError(CpuftError, RuntimeError):
    """A script does what cannot work on CPU ranks. It is a RuntimeError, too, as torch's own error would be."""


@dataclass
class _WrappedModel:
    """A model in DistributedDataParallel, and whether the script calls the wrapper, which it may even throw away."""

    module: weakref.ref[Any]
    optimizers: set[int] = field(default_factory=set)
    """The `id()` of each optimizer that has changed its parameters since the model was last called for training."""
    missed: int = 0
    """Number of steps since then by an optimizer that had already made one."""
    steps: int = 0
    """Number of all optimizer steps that have changed its parameters."""


class ConnectionCheck:
    """Checks that this rank forms one process group, or mpi4py's MPI_COMM_WORLD, with all others, and uses it."""

    def __init__(self, size: int, address: str = "") -> None:
        self.size = size
        self.address = address
        self.group_size = 0
        self.steps = 0
        self.exchanged = False
        """Whether a collective operation other than a barrier was seen."""
        self.advice = ""
        """What to change in the script, if something in it is known to keep the ranks apart."""
        self.wrapped: list[_WrappedModel] = []
        self._process = os.getpid()
        self._store: Any = None

    def note_group(self, size: int, store: Any = None) -> None:
        """Note that a default process group of `size` ranks was formed over torch's `store`; the largest one counts."""
        if size >= self.group_size:
            self.group_size, self._store = size, store

    def note_call(self, model: Any) -> None:
        """Note that `model`, a DistributedDataParallel, is called for training: count steps that miss it anew."""
        for wrapped in self.wrapped:
            if wrapped.module() is model.module:
                wrapped.optimizers.clear()
                wrapped.missed = 0

    def before_step(self, optimizer: Any = None, *_: Any) -> None:
        """Count an optimizer step, as a hook of all optimizers of torch. Raises RefusedScriptError: the ranks have no
        common group at step 1, exchanged no data until step 100, or differ in a model whose wrapper is not called.
        """
        self.steps += 1
        if self.steps == 1 and not self._is_joined():
            raise RefusedScriptError(self._describe("was stopped before its first optimizer step"))
        if self.steps in _CHECKED_STEPS:
            self._note_exchange()
        if self.steps <= _LAST_CHECKED_STEP and self.wrapped and optimizer is not None:
            self._check_wrapped(optimizer)
        if self.steps == _LAST_CHECKED_STEP and self._is_unused():
            raise RefusedScriptError(self._describe_unused(f"was stopped before optimizer step {self.steps}"))

    def check_end(self) -> None:
        """Raise RefusedScriptError after a script that succeeded, if its ranks formed no group or exchanged no data."""
        self._note_exchange()
        if not self._is_joined():
            raise RefusedScriptError(self._describe("ended with an error"))
        if self.steps and self._is_unused():
            raise RefusedScriptError(self._describe_unused("ended with an error"))

    def before_processes(self) -> None:
        """Raise RefusedScriptError if a script starts processes by torch.multiprocessing before any process group."""
        if not self.group_size:
            raise RefusedScriptError(f"the script starts processes of its own. Next: {_OWN_PROCESSES}")

    def before_group(self, init_method: object, store: object) -> None:
        """Raise RefusedScriptError if the script started this process itself, or these arguments of init_process_group
        or MASTER_ADDR give a wrong address of rank 0.
        """
        if os.getpid() != self._process:
            raise RefusedScriptError(f"the script starts processes of its own. Next: {_OWN_PROCESSES}")
        if store or not self.address:
            return
        url = urlsplit(str(init_method or "env://"))
        name = (url.hostname if url.scheme == "tcp" else os.environ.get("MASTER_ADDR")) or ""
        if url.scheme in ("tcp", "env") and name != self.address and _is_here(name) and not _is_here(self.address):
            raise RefusedScriptError(
                f"the script takes {name} for the address of rank 0, but on {socket.gethostname()} this is the host "
                f"itself, and rank 0 is on another host, {self.address}. Next: do not set MASTER_ADDR in the script, "
                f"and call init_process_group without init_method: cpuft launch has set MASTER_ADDR and MASTER_PORT"
            )

    def _check_wrapped(self, optimizer: Any) -> None:
        stepped = {id(one) for group in optimizer.param_groups for one in group["params"] if one.grad is not None}
        for number, wrapped in enumerate(self.wrapped):
            parameters = [one for one in getattr(wrapped.module(), "parameters", list)() if one.requires_grad]
            if stepped.isdisjoint(map(id, parameters)):
                continue
            wrapped.steps += 1
            if id(optimizer) not in wrapped.optimizers:  # several may share the parameters, or the call
                wrapped.optimizers.add(id(optimizer))
                continue
            wrapped.missed += 1
            if wrapped.missed in _COMPARED_AFTER and self._differs(f"{number}/{wrapped.steps}", parameters):
                name = type(wrapped.module()).__name__
                raise RefusedScriptError(
                    f"the script was stopped before optimizer step {self.steps} because each rank trains a copy of its "
                    f"own of {name}: the model is wrapped in DistributedDataParallel, but the script calls the model "
                    f"inside, so gradients are not averaged, and parameters differ between ranks. Next: call the "
                    f"wrapped model in the training loop, model(...) instead of model.module(...) or of the model from "
                    f"before DistributedDataParallel or accelerator.prepare; or start the script with cpuft launch "
                    f"--independent if its ranks are meant to train apart for some steps"
                )

    def _differs(self, key: str, parameters: list[Any]) -> bool:
        """Whether another rank has stored other parameters under this key; nothing waits for other ranks."""
        uint8, checksum = sys.modules["torch"].uint8, 0
        names = [f"cpuft/parameters/{key}/{rank}" for rank in range(self.size)]
        with suppress(RuntimeError, TypeError):  # the store is gone, or a parameter is no plain tensor
            for one in parameters:
                checksum = zlib.crc32(one.detach().contiguous().reshape(-1).view(uint8).numpy(), checksum)
            own = str(checksum).encode()
            self._store.set(names[int(os.environ["RANK"])], own)
            # The last rank to come sees all others.
            return any(self._store.get(name) != own for name in names if self._store.check([name]))
        return False

    def _is_joined(self) -> bool:
        return self.group_size == self.size or _count_mpi_ranks() == self.size

    def _is_unused(self) -> bool:
        return not self.exchanged and _count_mpi_ranks() != self.size

    def _note_exchange(self) -> None:
        if not self.exchanged:
            operations = list_operations()
            self.exchanged = operations is None or bool(operations.difference(_WITHOUT_DATA))

    def _describe(self, when: str) -> str:
        formed = f" (only one of {self.group_size})" if self.group_size else ""
        return (
            f"the script {when} because its {self.size} ranks are not connected: they formed no process group of "
            f"{self.size} ranks{formed}, so each rank works on a copy of its own. Next: {self.advice or _REMEDY}"
        )

    def _describe_unused(self, when: str) -> str:
        return (
            f"the script {when} because its {self.size} ranks are not connected: they formed a process group, but "
            f"exchanged no gradients or parameters in it, so each rank trained a copy of its own. Next: wrap "
            f"the model in DistributedDataParallel or pass it to accelerator.prepare, and call the wrapped model, "
            f"model(...) instead of model.module(...), or start the script with cpuft launch --independent if its "
            f"ranks are meant to be independent"
        )


def list_operations() -> set[str] | None:
    """Return the names of collective operations that this process has started; None if nothing has recorded them."""
    own = read_operations()
    names = {str(name) for name in own.get("names", ())} | {name for _, name in own.get("progress", {}).values()}
    found = None if os.environ.get("TORCH_FR_BUFFER_SIZE") == "0" else dump_recorder()
    if found is None:
        return names or None
    return names | {str(one["profiling_name"]).rpartition(":")[2] for one in found.get("entries", ())}


def _count_mpi_ranks() -> int:
    """Return the number of ranks in MPI_COMM_WORLD; 0 if mpi4py.MPI is not imported, not initialized, or finalized."""
    mpi = sys.modules.get("mpi4py.MPI")
    return int(mpi.COMM_WORLD.Get_size()) if mpi and mpi.Is_initialized() and not mpi.Is_finalized() else 0


def refuse_nccl(backend: object) -> None:
    """Raise RefusedScriptError if `backend` (None: torch's default) names NCCL without gloo and there is no GPU."""
    torch = sys.modules["torch"]
    name = str(backend or "").lower()
    if "nccl" in name and "gloo" not in name and not torch.cuda.is_available():
        raise RefusedScriptError(
            f'the script calls init_process_group with the backend "{name}", which needs GPUs: use "gloo", or after '
            f'"import cpuft.comm" also "mpi" or "ccl"'
        )


_current: ConnectionCheck | None = None


def describe_steps(has_succeeded: bool) -> str:
    """Return `format_steps` for this process with its line break; "" if its steps are not counted (`make_check`)."""
    if not _current:
        return ""
    return f"{format_steps(parse_world(os.environ), socket.gethostname(), has_succeeded, _current.steps)}\n"


def make_check(environ: Mapping[str, str]) -> ConnectionCheck | None:
    """Return a new check for this rank, whose steps `describe_steps` counts from then on; None unless
    CPUFT_CHECK_CONNECTED is 1 and WORLD_SIZE is above 1.
    """
    global _current
    size = environ.get("WORLD_SIZE", "1")
    _current = (
        ConnectionCheck(int(size), environ.get("MASTER_ADDR", ""))
        if environ.get(CHECK_VARIABLE) == "1" and size.isdecimal() and int(size) > 1
        else None
    )
    return _current


def list_patches(check: ConnectionCheck) -> dict[str, Callable[[Any], None]]:
    """Return module name -> function that patches this module, to be called once with it when it has been imported."""
    lightning = functools.partial(_use_all_ranks, check=check)
    return {
        "torch.optim.optimizer": lambda module: module.register_optimizer_step_pre_hook(check.before_step),
        "torch.nn.parallel.distributed": functools.partial(_watch_wrapped_models, check=check),
        "torch.multiprocessing.spawn": functools.partial(_refuse_spawned_processes, check=check),
        "accelerate.state": _join_on_cpus,
        "transformers.training_args": _train_on_cpus,
        "lightning.pytorch.trainer.connectors.accelerator_connector": lightning,
        "lightning.fabric.connector": lightning,
        "pytorch_lightning.trainer.connectors.accelerator_connector": lightning,
        "lightning_fabric.connector": lightning,
    }


def _watch_wrapped_models(distributed: Any, check: ConnectionCheck) -> None:
    wrapper, torch = distributed.DistributedDataParallel, distributed.torch
    make, forward = wrapper.__init__, wrapper.forward

    @functools.wraps(make)
    def make_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        check.wrapped.append(_WrappedModel(weakref.ref(self.module)))

    @functools.wraps(forward)
    def note_and_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled():  # a validation may forget no_grad()
            check.note_call(self)
        return forward(self, *args, **kwargs)

    wrapper.__init__, wrapper.forward = make_and_note, note_and_forward


def _refuse_spawned_processes(spawn: Any, check: ConnectionCheck) -> None:
    start = spawn.start_processes

    @functools.wraps(start)
    def refuse_or_start(*args: Any, **kwargs: Any) -> Any:
        check.before_processes()
        return start(*args, **kwargs)

    spawn.start_processes = refuse_or_start


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


def _use_all_ranks(connector: Any, check: ConnectionCheck) -> None:
    """Let `devices="auto"` of Lightning's Trainer and Fabric, which means one process on CPUs, mean one for each rank.
    Another number becomes the advice of the check, because Lightning then trains each rank by itself or fails.
    """
    for name in ("_AcceleratorConnector", "_Connector"):
        if found := getattr(connector, name, None):
            own = found._set_devices_flag_if_auto_passed

            @functools.wraps(own)
            def choose(self: Any, own: Callable[[Any], None] = own) -> None:
                if "CPU" in type(self.accelerator).__name__:
                    # Lightning multiplies `devices` by `num_nodes` (1 by default), and wants WORLD_SIZE.
                    if self._devices_flag == "auto":
                        self._devices_flag = max(1, check.size // self._num_nodes_flag)
                    elif str(self._devices_flag) != str(check.size // self._num_nodes_flag):
                        check.advice = (
                            f"leave out devices={self._devices_flag!r} of Lightning's Trainer or Fabric, or write "
                            f'devices="auto", which means all {check.size} ranks of this launch'
                        )
                own(self)

            found._set_devices_flag_if_auto_passed = choose


def explain_exception(error: BaseException, check: ConnectionCheck | None) -> str:
    """Return what to change in a script that ended with an exception: about Intel's replaced packages, such as
    intel_extension_for_pytorch, or `check.advice` if no step was made; "" if nothing is known.
    """
    found = [error.name or ""] if isinstance(error, ImportError) else []
    traceback = error.__traceback__
    while traceback:
        if traceback.tb_frame.f_code.co_name == "<module>":
            found.append(str(traceback.tb_frame.f_globals.get("__name__")))
        traceback = traceback.tb_next
    package = next((one for name in found if (one := name.partition(".")[0]) in _REPLACED_PACKAGES), "")
    if package:
        return (
            f"{package} cannot be imported, and PyTorch itself has what it was for. Remove the import and calls such "
            f'as ipex.optimize, and write import cpuft.comm if the script uses the backends "ccl" or "mpi"'
        )
    return check.advice if check and not check.steps else ""


def _is_here(address: str) -> bool:
    with suppress(OSError, UnicodeError):
        family, kind, _, _, place = socket.getaddrinfo(address or None, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
            return bool(address)
    return False
