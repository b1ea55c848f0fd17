"""Makes this Python resemble that of macOS or Windows, by `FOREIGN_SYSTEM`; it is imported through PYTHONPATH.

What only Linux has is missing then, as far as a test can take it away: modules, functions, constants, the files in
/proc and /sys, and with the folder `bin` in PATH the options that only GNU's programs have. Windows is imitated for
imports and for files alone: paths stay those of this machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import importlib
import importlib.abc
import os
import select
import signal
import socket
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

SYSTEM = os.environ["FOREIGN_SYSTEM"]
LINUX: dict[ModuleType, str] = {
    os: "memfd_create sched_getaffinity sched_setaffinity pidfd_open eventfd splice pipe2 copy_file_range unshare "
    "setns posix_fadvise posix_fallocate getxattr O_DIRECT O_PATH O_NOATIME",
    signal: "SIGRTMIN SIGRTMAX SIGPWR sigtimedwait sigwaitinfo",
    select: "epoll",
    socket: "TCP_USER_TIMEOUT AF_NETLINK AF_PACKET",
}
UNIX: dict[ModuleType, str] = {
    os: "getuid geteuid getgid getegid getgroups fork openpty killpg setsid getpgid getsid uname sysconf "
    "getloadavg chown lchown mkfifo nice pread pwrite readv writev preadv pwritev set_blocking O_NOFOLLOW O_CLOEXEC "
    "O_NONBLOCK O_DIRECTORY O_SYNC",
    signal: "SIGKILL SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGURG SIGALRM SIGCHLD SIGPIPE SIGTSTP SIGCONT SIGSTOP "
    "pthread_sigmask pthread_kill sigwait setitimer alarm siginterrupt",
    select: "poll",
    socket: "AF_UNIX",
}
UNIX_MODULES = ("fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
FOREIGN_PATHS = ("/proc", "/sys")


class _NoUnixModules(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in UNIX_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


class _Library:
    """A library of Windows, all of whose functions return 1."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            return 1

        setattr(self, name, function)
        return function


def _make_locks() -> ModuleType:
    """Return msvcrt with the locks of this machine, of which a process has its own."""
    windows, lock = ModuleType("msvcrt"), fcntl.flock

    def locking(file: int, mode: int, size: int) -> None:
        try:
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PermissionError(error.errno, error.strerror) from None

    vars(windows).update(LK_NBLCK=2, locking=locking)
    return windows


def _remove(names: dict[ModuleType, str]) -> None:
    for module, text in names.items():
        for name in text.split():
            if hasattr(module, name):
                delattr(module, name)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Let files of Linux, and sockets with abstract names, not exist."""
    if event in ("open", "os.listdir", "os.scandir"):
        _refuse_path(arguments[0])
    elif event == "socket.bind" and str(arguments[1]).startswith("\0"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def _refuse_path(path: Any) -> None:
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    if isinstance(text, str) and any(text == root or text.startswith(f"{root}/") for root in FOREIGN_PATHS):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)


def _hide_files() -> None:
    for name in ("stat", "lstat", "access"):
        setattr(os, name, functools.partial(_look, getattr(os, name)))
    sys.addaudithook(_refuse)


def _look(real: Any, path: Any, *arguments: Any, **options: Any) -> Any:
    _refuse_path(path)
    return real(path, *arguments, **options)


def _hide_calls() -> None:
    """Let the kernel and the C library know no call that only Linux has."""
    real = ctypes.CDLL.__getattr__

    def find(self: ctypes.CDLL, name: str) -> Any:
        if name in ("prctl", "renameat2", "syscall"):
            raise AttributeError(f"dlsym({name}): symbol not found")
        return real(self, name)

    def refuse_control(file: Any, command: int, *rest: Any, known: Any = fcntl.fcntl) -> Any:
        if command >= 1024:  # F_LINUX_SPECIFIC_BASE
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return known(file, command, *rest)

    def refuse_device(*arguments: Any) -> Any:
        raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))

    for place, name, function in (
        (ctypes.CDLL, "__getattr__", find),
        (fcntl, "fcntl", refuse_control),
        (fcntl, "ioctl", refuse_device),
    ):
        setattr(place, name, function)


sysconfig.get_config_vars()  # which it finds by the name of the system
with contextlib.suppress(ImportError):
    importlib.import_module("psutil")  # which chooses by the system when it is imported
_remove(LINUX)
if SYSTEM == "darwin":
    _hide_calls()
    proxies: Any = ModuleType("_scproxy")  # which urllib asks for proxies there
    proxies._get_proxy_settings = proxies._get_proxies = dict
    sys.modules["_scproxy"] = proxies
    os.environ["PATH"] = f"{Path(__file__).parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    os.environ["REAL_PYTHON"] = sys.executable
    sys.executable = str(Path(__file__).parent / "bin/python")
else:
    # These choose by the system when they are imported, and would look for Windows itself.
    for name in ("click", "click.shell_completion", "paramiko", "rich.console", "rich.table", "numpy", "subprocess"):
        importlib.import_module(name)
    sys.modules["msvcrt"] = _make_locks()
    vars(ctypes)["WinDLL"] = _Library
    vars(sys.modules["subprocess"])["CREATE_NEW_PROCESS_GROUP"] = 0
    for name in UNIX_MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _NoUnixModules())
    _remove(UNIX)
_hide_files()
sys.platform = SYSTEM
