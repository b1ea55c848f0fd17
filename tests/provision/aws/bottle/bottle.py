"""A region in a bottle, from a test's side: what is typed on a laptop there, and what is seen of it from outside."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import tests
from tests.provision.aws.bottle.machines import GATEWAY
from tests.provision.aws.region import NOTHING, REGION
from tests.provision.simulated import write_wheel, write_wheels

_PLACE = ("--region", REGION, "--ssh-from", GATEWAY)
WORDS = (*_PLACE, "--yes")
"""What `cpuft provision aws` must be told there."""
NOTHING_LEFT: dict[str, list[str]] = NOTHING | {"images": [], "snapshots": []}
_ROOT = str(Path(tests.__file__).parents[1])
_START_SECONDS = 90.0
_END_SECONDS = 30.0
_NAMESPACES = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


@dataclass(frozen=True)
class Bottle:
    """A region that is open."""

    folder: Path
    """Working folder of what is typed on the laptop; its clusters are remembered in `state` below it."""
    url: str
    """Of AWS."""
    pid: int = 0
    """A process in the namespaces of the region; 0 where it has none."""

    def ask(self, name: str, *words: Any) -> Any:
        """A method of `server.Desk`."""
        with Client(str(self.folder / "desk"), "AF_UNIX") as connection:
            connection.send((name, *words))
            assert connection.poll(_END_SECONDS), name
            answer = connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def environ(self) -> dict[str, str]:
        """What the laptop's commands find: AWS, with credentials of no worth."""
        own = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_CONFIG_FILE": "/nonexistent",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
            "AWS_EC2_METADATA_DISABLED": "true",
            "CPUFT_STATE": str(self.folder / "state"),
        }
        return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | own

    def start(self, command: Sequence[str], **settings: str) -> subprocess.Popen[str]:
        """A command of the laptop that goes on meanwhile."""
        pipe = subprocess.PIPE
        enter = ["nsenter", f"--net=/proc/{self.pid}/ns/net"] if self.pid else []
        words, environ = [*enter, *command], self.environ | settings
        return subprocess.Popen(words, cwd=self.folder, env=environ, stdout=pipe, stderr=pipe, text=True)

    def laptop(self, *command: str, seconds: float = 200.0, **settings: str) -> subprocess.CompletedProcess[str]:
        """A command of the laptop, to its end."""
        with self.start(command, **settings) as process:
            try:
                output, errors = process.communicate(timeout=seconds)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def cpuft(self, *words: str, seconds: float = 200.0, **settings: str) -> subprocess.CompletedProcess[str]:
        """A cpuft command, as a user types it."""
        return self.laptop(sys.executable, "-m", "cpuft", *words, seconds=seconds, **settings)

    def rent(self, ahead: float, *words: str) -> subprocess.CompletedProcess[str]:
        """Rent and do not log in, on a laptop whose clock is so many seconds ahead."""
        module = "tests.provision.aws.bottle.laptop"
        return self.laptop(sys.executable, "-m", module, str(ahead), *_PLACE, "--yes=True", *words, PYTHONPATH=_ROOT)

    def empty(self, name: str) -> None:
        """Take a cluster down, if a test has left anything of it."""
        if self.ask("left") != NOTHING_LEFT or (self.folder / "state" / name).exists():
            gone = self.cpuft("provision", "down", name, "--region", REGION)
            assert gone.returncode == 0, gone.stderr

    def live(self) -> list[dict[str, Any]]:
        """Instances that cost money."""
        return [one for one in self.ask("instances") if one["state"] != "terminated"]

    def disk(self, name: str) -> Path:
        """What an instance wrote onto its disk, seen from here."""
        return Path(f"/proc/{self.pid}/root{self.folder}/disk/{name}/upper")


@contextmanager
def open_bottle(folder: Path, hosts: bool = True) -> Iterator[Bottle]:
    """A region in `folder`, a new one. Without `hosts` (which want root) its instances are words only.

    Nothing of it outlives this process, however that ends: its server ends with the pipe that it reads.
    """
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.provision.aws.bottle.server", str(folder), *(["hosts"] if hosts else [])]
    # It outlives a test, so it is not one of a test's own processes.
    kept = {name: value for name, value in os.environ.items() if name != "TEST_OF" and not name.startswith("AWS_")}
    environ = kept | {"PYTHONPATH": _ROOT, "PATH": f"{kept.get('PATH', '')}:/usr/sbin:/sbin"}
    pipe = subprocess.PIPE
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [*(_NAMESPACES if hosts else ()), *command], env=environ, stdin=pipe, stdout=pipe, stderr=log, text=True
        )
    assert server.stdin
    assert server.stdout
    try:
        assert select.select([server.stdout], [], [], _START_SECONDS)[0], (folder / "server.log").read_text()
        url = server.stdout.readline().strip()
        assert url, (folder / "server.log").read_text()
        yield Bottle(folder, url, server.pid if hosts else 0)
    finally:
        server.stdin.close()
        try:
            server.wait(_END_SECONDS)
        finally:
            server.kill()
            server.stdout.close()


def write_machine_wheels(folder: Path) -> None:
    """Wheels by which instances train within seconds and without a network: names, and the way to this environment.

    They see this machine's files below their own.
    """
    write_wheels(folder)
    here = sysconfig.get_path("scripts")
    programs = {
        f"machine-99.0.data/scripts/{name}": f'#!/bin/sh\nexec {here}/{name} "$@"\n'
        for name in ("mpirun", "mpiexec.hydra")
    }
    write_wheel(folder, "machine", {"machine.pth": f"{sysconfig.get_path('purelib')}\n", **programs})
