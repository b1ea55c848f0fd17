"""Run a user's Python script as Python would, and end the process without what makes some of them hang.

    python -m cpuft.rank.script SCRIPT.py ARGS...
    python -m cpuft.rank.script -m MODULE ARGS...

Three problems of torch are avoided here:

- gloo's threads release the last tensors after a collective has ended, for which they need the interpreter. If the
  interpreter is being finalized by then, Python 3.11 ends such a thread, which holds the lock that the process group's
  destructor waits for. The rank then never ends, or aborts; with one core per rank, in two runs of five. So the
  interpreter is not finalized.
- The same thread and destructor wait for each other when a function returns whose DistributedDataParallel was the last
  object to hold the group (two runs of a hundred, torch 2.13). So the group of all ranks is only shut down, and never
  destroyed.
- torch's store has no password and listens on all interfaces. Here it listens on MASTER_ADDR only.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import functools
import importlib.util
import ipaddress
import os
import re
import runpy
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

from cpuft.rank.connection_check import (
    ConnectionCheck,
    RefusedScriptError,
    describe_steps,
    explain_exception,
    list_patches,
    make_check,
    refuse_nccl,
)
from cpuft.rank.diagnostics import RECORDER, start_reporting, wait_for_stack_dump
from cpuft.rank.interruption import handle_interruption
from cpuft.rank.process import format_failure, leave_job
from cpuft.rank.world import parse_world

_POLL_SECONDS = 0.01
"""torch waits half a second for a store that opens a moment later, which is a twelfth of a start."""


def run_script(
    argv: Sequence[str],
    refusals: tuple[type[Exception], ...] = (RefusedScriptError,),
    check: ConnectionCheck | None = None,
) -> int:
    """Run a script, or a module with its name after "-m", as `__main__` in this process with the other words of `argv`
    as arguments, and return its exit code, which is also 2 if `check` finds at the end that the ranks were not
    connected. Exceptions are reported (`report_exception`).
    """
    code = _run_script(argv, refusals, check)
    if check and not code:
        try:
            check.check_end()
        except RefusedScriptError as error:
            return _report_refusal(error)
        sys.stderr.write(describe_steps(has_succeeded=True))
    return code


def _report_refusal(error: Exception, mark: str = "") -> int:
    print(f"{mark}cpuft: error: {error}", file=sys.stderr)
    return 2


def _run_script(argv: Sequence[str], refusals: tuple[type[Exception], ...], check: ConnectionCheck | None) -> int:
    is_module = argv[0] == "-m"
    path, sys.argv = argv[is_module], list(argv[is_module:])
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.realpath(path)))
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if is_module:
            runpy._run_module_as_main(path)  # type: ignore[attr-defined]  # what `python -m` calls
            return 0
        vars(module).update(__file__=path, __builtins__=builtins)
        with open(path, "rb") as file:
            exec(compile(file.read(), path, "exec", dont_inherit=True), module.__dict__)  # not our annotations
    except BaseException as error:
        return report_exception(error, refusals, __file__, check)
    return 0


def report_exception(
    error: BaseException,
    refusals: tuple[type[Exception], ...],
    caller: str,
    check: ConnectionCheck | None = None,
    mark: str = "",
) -> int:
    """Report the exception that ended the user's code on standard error, as Python would, and return the exit code: 2
    for `refusals`, which are reported in one line without a traceback, 130 for KeyboardInterrupt, else Python's.

    After a time-out of torch the call first waits for the supervisor to dump stacks. Frames of the file `caller` at the
    begin of the traceback are left out. `mark` begins each line.
    """
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    if isinstance(error, refusals):
        return _report_refusal(error, mark)
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == caller:
        frames = frames.tb_next
    error.__traceback__ = frames
    # Python sets these, too. Exit handlers read them to see that the script has failed.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
    if mark:
        text = "".join(traceback.format_exception(error))
        sys.stderr.write("".join(f"{mark}{line}" for line in text.splitlines(keepends=True)))
    else:
        sys.excepthook(type(error), error, frames)
    if advice := explain_exception(error, check):
        print(f"{mark}cpuft: {advice}", file=sys.stderr)
    sys.stderr.write(describe_steps(has_succeeded=False))
    if is_timeout(error):
        line = format_failure(parse_world(os.environ), socket.gethostname(), 1)
        wait_for_stack_dump(f"{line}\n", error)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def is_timeout(error: BaseException) -> bool:
    """Return whether this is torch's error after a long wait for other ranks: a RuntimeError that says "timed out"."""
    return isinstance(error, RuntimeError) and bool(re.search(r"tim(ed|e) ?out", str(error), re.IGNORECASE))


class ModulePatcher:
    """An import hook for `sys.meta_path` that patches modules when they are imported, each once."""

    def __init__(self, patches: dict[str, Callable[[Any], None]]) -> None:
        self._patches = patches

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module to patch, with a loader that patches it; None for others, and after the first
        time.
        """
        patch = self._patches.pop(name, None)
        spec = importlib.util.find_spec(name) if patch else None
        if patch and spec and spec.loader:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _patch_process_groups(distributed_c10d: Any, check: ConnectionCheck | None) -> None:
    own = distributed_c10d.init_process_group

    @functools.wraps(own)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        refuse_nccl(args[0] if args else kwargs.get("backend"))
        if check:
            check.before_group(args[1] if len(args) > 1 else kwargs.get("init_method"), kwargs.get("store"))
        own(*args, **kwargs)
        keep_forever(distributed_c10d.group.WORLD)
        if check:
            check.note_group(distributed_c10d.get_world_size(), distributed_c10d._get_default_store())

    distributed_c10d.init_process_group = init_process_group


def restrict_stores(rendezvous: Any) -> None:
    """Let the stores of torch.distributed.rendezvous listen only on their own address, and be found there at once. The
    other ranks wait up to 10 s for it. If the address is a name, which may mean the loopback interface on its own host,
    or no address of this host, the store listens on all interfaces. Calling this again changes nothing.
    """
    own = rendezvous.TCPStore

    @functools.wraps(own)
    def make_store(*args: Any, **kwargs: Any) -> Any:
        place, listener = (kwargs["host_name"], kwargs["port"]), None
        if kwargs.get("is_master"):
            listener = _listen(*place)
        else:
            wait_for_listener(*place)
        return own(*args, **kwargs, **({"master_listen_fd": listener.detach()} if listener else {}))

    if not hasattr(own, "__wrapped__"):
        rendezvous.TCPStore = make_store


def _listen(address: str, port: int) -> socket.socket | None:
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    except (ValueError, OSError):
        return None  # torch reports errors better, or finds the store that this process has there already


def wait_for_listener(address: str, port: int, seconds: float = 10.0) -> None:
    """Wait until a process listens on a TCP port, at most `seconds`, or until an error that torch reports better."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), timeout=left).close()
            return
        except ConnectionRefusedError:
            time.sleep(_POLL_SECONDS)
        except OSError:
            return


def prepare_torch() -> ConnectionCheck | None:
    """Prepare this process for a script, before torch is imported; return the check for `run_script`, or None as
    `make_check`. An import hook patches torch and other libraries as this module and `connection_check` say.
    """
    os.environ.setdefault(*RECORDER)
    start_reporting(reports_waits=True)
    check = make_check(os.environ)
    patches: dict[str, Callable[[Any], None]] = {
        "torch.distributed.distributed_c10d": functools.partial(_patch_process_groups, check=check),
        "torch.distributed.rendezvous": restrict_stores,
        **(list_patches(check) if check else {}),
    }
    sys.meta_path.insert(0, ModulePatcher(patches))
    return check


def keep_forever(thing: object) -> None:
    """Never destroy an object, because destructors may wait for threads. The process must end with `end_process`."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def end_process(code: int) -> NoReturn:
    """Wait for the process's threads, run exit handlers and write buffers, as at the end of Python, and end the process
    without finalizing Python. MPI is finalized if `code` is 0.
    """
    if code and (backend := sys.modules.get("cpuft.comm.backends.mpi")):
        atexit.unregister(backend._finalize)  # it would wait for ranks that wait for this one
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if code == 0:  # finalizing waits for the other ranks
        _finalize_mpi()
    flush_and_exit(code)


def _finalize_mpi() -> None:
    """Finalize MPI, as mpi4py does when Python is finalized; without it, mpirun believes that the rank has failed."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and sys.modules["mpi4py"].rc.finalize is not False and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def flush_and_exit(code: int) -> NoReturn:
    """Write the buffers of Python and C as far as possible, and end the process at once. No exit handlers run: after
    success, Hydra is told what MPICH's would tell it (`leave_job`).
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no stream, a broken one, or a closed one
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    if code == 0 and (mpi := sys.modules.get("mpi4py.MPI")):
        leave_job(mpi, os.environ)
    os._exit(code)


if __name__ == "__main__":
    connection_check = prepare_torch()
    handle_interruption(is_script=True)
    end_process(run_script(sys.argv[1:], check=connection_check))
