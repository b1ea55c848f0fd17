"""A user's Python script, run as Python would, and ended without what makes some of them hang.

    python -m cpuft.rank.script SCRIPT.py ARGS...
    python -m cpuft.rank.script -m MODULE ARGS...

gloo's threads let go of the last tensors after the collective is over, for which they need the interpreter. When that
is being taken down by then, Python 3.11 ends such a thread, which holds the lock that the process group's destructor
waits for: the rank never ends, or aborts. With a core a rank that happened in two runs of five.

The same thread and destructor wait for each other when a function returns whose DistributedDataParallel was the last to
hold the group (two runs of a hundred, torch 2.13): so the group of all ranks is never destroyed, only shut down.

torch's store asks nobody who they are and listens on all interfaces: here on the master's address only.
"""

from __future__ import annotations

import atexit
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
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

from cpuft.rank.connection_check import ConnectionCheck, RefusedScriptError, changes, make_check, refuse_nccl
from cpuft.rank.interruption import handle_interruption
from cpuft.rank.process import format_failure
from cpuft.rank.reporting import RECORDER, hold, start_reporting
from cpuft.rank.world import parse_world

_LOOK_SECONDS = 0.01
"""Half a second, as torch waits for a master that comes a moment later, is a twelfth of a start."""


def run_script(
    words: Sequence[str],
    refusals: tuple[type[Exception], ...] = (RefusedScriptError,),
    check: ConnectionCheck | None = None,
) -> int:
    """Run a script, or with `-m` a module, with its arguments as `__main__`; its exit code.

    An exception is reported as Python does, but one of `refusals` in one line, and the code is 2. So it is when the
    script ends well, but `check` finds that its ranks were not connected.
    """
    code = _run_script(words, refusals)
    if check and not code:
        try:
            check.check_end()
        except RefusedScriptError as error:
            return _refuse(error)
    return code


def _refuse(error: Exception) -> int:
    print(f"cpuft: error: {error}", file=sys.stderr)
    return 2


def _run_script(words: Sequence[str], refusals: tuple[type[Exception], ...]) -> int:
    is_module = words[0] == "-m"
    path, sys.argv = words[is_module], list(words[is_module:])
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(path)))
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if is_module:
            runpy._run_module_as_main(path)  # type: ignore[attr-defined]  # what `python -m` calls
            return 0
        module.__file__ = path
        with open(path, "rb") as file:
            exec(compile(file.read(), path, "exec"), module.__dict__)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except refusals as error:
        return _refuse(error)
    except BaseException as error:
        # Without the frame of this function.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        # Python sets these, too; exit handlers see by them that the script failed.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        if is_deadline(error):
            mark = format_failure(parse_world(os.environ), socket.gethostname(), 1)
            hold(f"{mark}\n", error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def is_deadline(error: BaseException) -> bool:
    """Whether torch has waited for other ranks as long as it may, and they may still stand where they hang."""
    return isinstance(error, RuntimeError) and bool(re.search(r"tim(ed|e) ?out", str(error), re.IGNORECASE))


class ChangeModules:
    """An import hook that changes modules when, and if, they are imported."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The module's own, with a loader that changes it; none for modules that stay as they are."""
        change = self._changes.pop(name, None)
        spec = importlib.util.find_spec(name) if change else None
        if change and spec and spec.loader:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _keep_groups(distributed_c10d: Any, check: ConnectionCheck | None) -> None:
    own = distributed_c10d.init_process_group

    @functools.wraps(own)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        refuse_nccl(args[0] if args else kwargs.get("backend"))
        own(*args, **kwargs)
        keep_for_good(distributed_c10d.group.WORLD)
        if check:
            check.note_group(distributed_c10d.get_world_size())

    distributed_c10d.init_process_group = init_process_group


def listen_narrowly(rendezvous: Any) -> None:
    """Let stores that torch.distributed.rendezvous makes listen on the address alone that they are made for, and be
    found there at once.

    Where that is a name, or no address of this host, they listen on all interfaces as ever: a name may mean loopback
    on its own host. Doing it again changes nothing.
    """
    own = rendezvous.TCPStore

    @functools.wraps(own)
    def make(*args: Any, **kwargs: Any) -> Any:
        place, listener = (kwargs["host_name"], kwargs["port"]), None
        if kwargs.get("is_master"):
            listener = _listen(*place)
        else:
            await_listener(*place)
        return own(*args, **kwargs, **({"master_listen_fd": listener.detach()} if listener else {}))

    if not hasattr(own, "__wrapped__"):
        rendezvous.TCPStore = make


def _listen(address: str, port: int) -> socket.socket | None:
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    except (ValueError, OSError):
        return None  # torch says better what is wrong, or finds the store that this process has there already


def await_listener(address: str, port: int, seconds: float = 10.0) -> None:
    """Until there is one, or for as long as ranks come apart. What is wrong otherwise torch says better."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), timeout=left).close()
            return
        except ConnectionRefusedError:
            time.sleep(_LOOK_SECONDS)
        except OSError:
            return


def change_torch() -> ConnectionCheck | None:
    """Never destroy the group of all ranks that the script is going to make, and let its store listen narrowly.

    This process can be looked at from now on, with the operations of torch's own groups. Libraries are changed so that
    ranks on CPUs join. Returns the check that they did, for `run_script`; None where there is nothing to check.

    To be called before torch is imported.
    """
    os.environ.setdefault(*RECORDER)
    start_reporting()
    check = make_check(os.environ)
    wanted: dict[str, Callable[[Any], None]] = {
        "torch.distributed.distributed_c10d": functools.partial(_keep_groups, check=check),
        "torch.distributed.rendezvous": listen_narrowly,
        **(changes(check) if check else {}),
    }
    sys.meta_path.insert(0, ChangeModules(wanted))
    return check


def keep_for_good(thing: object) -> None:
    """Never let go of it. For a process that `end`s or leaves as here, since destructors also wait for threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def end(code: int) -> NoReturn:
    """End the process: its threads, exit handlers and buffers as Python does, but the interpreter is not taken down."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if code == 0:
        _finalize_mpi()
    flush_and_exit(code)


def _finalize_mpi() -> None:
    """What mpi4py does when the interpreter goes; without it mpirun takes the rank for a failed one.

    A failed one leaves without: it would wait for the others. So does one whose mpi4py is told so, as by cpuft.comm.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and sys.modules["mpi4py"].rc.finalize is not False and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def flush_and_exit(code: int) -> NoReturn:
    """End the process at once, with what it has written, in Python and in C, as far as somebody takes that."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, broken, closed
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


if __name__ == "__main__":
    connection = change_torch()
    handle_interruption(is_script=True)
    end(run_script(sys.argv[1:], check=connection))
