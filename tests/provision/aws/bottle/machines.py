"""Machines: each is a process with namespaces, a disk, an address and a console of its own."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

GATEWAY = "172.31.0.1"
"""Address of the region itself, and of laptops in it."""
METADATA = "169.254.169.254"
HERE = Path(__file__).parent
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BRIDGE = "aws0"
_END_SECONDS = 30.0
_HIDDEN = ("opt/cpuft", "var/lib/cpuft", "var/lib/cloud", "etc/systemd/system/cpuft-lease.service")
"""Files that this machine may have and Debian's image has not."""
_SSHD = """KbdInteractiveAuthentication no
PasswordAuthentication no
# Otherwise PAM needs a login session of systemd.
UsePAM no
UseDNS no
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
"""


def wire() -> None:
    """Set up the region's network in the namespace of this process."""
    made = [
        "link set dev lo up",
        f"link add dev {_BRIDGE} type bridge",
        f"address add {GATEWAY}/16 dev {_BRIDGE}",
        f"address add {METADATA}/32 dev {_BRIDGE}",
        f"link set dev {_BRIDGE} up",
    ]
    for words in made:
        subprocess.run(["ip", *words.split()], check=True)


def make_base(layer: Path) -> str:
    """Make Debian's image: this machine's root filesystem under a layer that hides keys and clusters.

    The layer also has the replacements of systemd, and `python3` is this Python. Returns both layers for an overlay.
    """
    hidden = [*_HIDDEN, *(f"etc/ssh/{path.name}" for path in Path("/etc/ssh").glob("ssh_host_*"))]
    for path in (layer / name for name in hidden):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
    for name, mode in (("root", 0o700), ("root/.ssh", 0o700), ("var/tmp", 0o1777)):
        (layer / name).mkdir(parents=True, exist_ok=True)
        (layer / name).chmod(mode)
    for name in ("root/.ssh", "var/tmp"):
        os.setxattr(layer / name, "trusted.overlay.opaque", b"y")
    texts = {
        "usr/local/sbin/systemctl": (HERE / "systemctl.sh").read_text(encoding="utf-8"),
        "usr/local/sbin/shutdown": (HERE / "shutdown.sh").read_text(encoding="utf-8"),
        "usr/local/bin/python3": f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} "$@"\n',
        "etc/ssh/sshd_config": _SSHD,
        "etc/machine-id": "",
        "etc/resolv.conf": "",
    }
    for name, text in texts.items():
        (layer / name).parent.mkdir(parents=True, exist_ok=True)
        (layer / name).write_text(text, encoding="utf-8")
        (layer / name).chmod(0o755)
    return f"{layer}:/"


class Machine:
    """A machine from its first boot to its end. `powered_off` is called when it shuts down by itself.

    `lower` has the layers below its disk, separated by colons. Everything that it writes is in `folder`.
    """

    def __init__(self, folder: Path, instance: Any, lower: str, powered_off: Callable[[], None]) -> None:
        self.folder, self.lower = folder, lower
        self.notice: dict[str, str] = {}
        """Interruption notice, as the metadata service returns it."""
        self._powered_off = powered_off
        self._images = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._environ = {
            "PATH": PATH,
            "LANG": "C.UTF-8",
            "DISK": str(folder),
            "NAME": f"ip-{instance.private_ip.replace('.', '-')}",
            "ADDRESS": instance.private_ip,
            "PUBLIC": instance.public_ip or "",
            "LINK": f"i{instance.id[-12:]}",
            "BRIDGE": _BRIDGE,
            "GATEWAY": GATEWAY,
            "PYTHON": sys.executable,
            "FIRST_BOOT": str(HERE / "first_boot.py"),
        }
        for name in ("root", "upper", "work"):
            (folder / name).mkdir(parents=True)

    @property
    def console(self) -> Path:
        """Return the text on its console."""
        return self.folder / "console"

    def start(self, impostor: bool = False, broken: str = "") -> None:
        """Boot it. An `impostor` has another host key than its console says; `broken` is BROKEN of boot.sh."""
        words = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        environ = self._environ | {"LOWER": self.lower, "IMPOSTOR": "yes" * impostor, "BROKEN": broken}
        with open("/proc/self/ns/net", "rb") as network, self.console.open("ab") as console:
            process = subprocess.Popen(
                [*words, "sh", str(HERE / "boot.sh")], env=environ, stdin=network, stdout=console, stderr=console
            )
        self._process = process
        Thread(target=self._watch, args=(process,), daemon=True).start()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        if self._process is process:
            self._powered_off()

    def end(self) -> None:
        """Cut its power. None of its processes runs when this returns."""
        process, self._process = self._process, None
        if process and process.poll() is None:
            with suppress(OSError):
                # Kill its first process; unshare ends when all other processes have ended with it.
                first = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
                os.kill(int(first[0]) if first else process.pid, signal.SIGKILL)
            process.wait(_END_SECONDS)

    def freeze(self) -> str:
        """Freeze its disk as a layer, continue on a new layer above, and return the layers of an image of it."""
        was_on = self._process is not None
        self.end()
        self._images += 1
        layer = self.folder / f"image-{self._images}"
        (self.folder / "upper").rename(layer)
        (self.folder / "upper").mkdir()
        self.lower = f"{layer}:{self.lower}"
        if was_on:
            self.start()
        return self.lower
