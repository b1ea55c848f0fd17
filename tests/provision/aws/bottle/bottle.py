"""The interface of tests to the simulated region: commands of a user's laptop, and a view from outside."""

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
"""Options that `cpuft provision aws` needs in the simulated region."""
NOTHING_LEFT: dict[str, list[str]] = NOTHING | {"images": [], "snapshots": []}
_ROOT = str(Path(tests.__file__).parents[1])
_START_SECONDS = 90.0
_END_SECONDS = 30.0
_NAMESPACES = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


@dataclass(frozen=True)
class Bottle:
    """An open region."""

    folder: Path
    """Working folder of the laptop's commands. Its clusters are recorded in the folder `state` below."""
    url: str
    """URL of the AWS endpoint."""
    pid: int = 0
    """A process in the namespaces of the region; 0 for a region without namespaces."""

    def ask(self, name: str, *words: Any) -> Any:
        """Call a method of `server.Desk`, and return its result."""
        with Client(str(self.folder / "desk"), "AF_UNIX") as connection:
            connection.send((name, *words))
            assert connection.poll(_END_SECONDS), name
            answer = connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables of the laptop's commands, with the endpoint and invalid credentials."""
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
        """Start a command on the laptop, and do not wait for it."""
        pipe = subprocess.PIPE
        enter = ["nsenter", f"--net=/proc/{self.pid}/ns/net"] if self.pid else []
        words, environ = [*enter, *command], self.environ | settings
        return subprocess.Popen(words, cwd=self.folder, env=environ, stdout=pipe, stderr=pipe, text=True)

    def laptop(self, *command: str, seconds: float = 200.0, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the laptop until it ends."""
        with self.start(command, **settings) as process:
            try:
                output, errors = process.communicate(timeout=seconds)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def cpuft(self, *words: str, seconds: float = 200.0, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run a cpuft command, as a user types it."""
        return self.laptop(sys.executable, "-m", "cpuft", *words, seconds=seconds, **settings)

    def rent(self, ahead: float, *words: str) -> subprocess.CompletedProcess[str]:
        """Rent without logging in, on a laptop whose clock is ahead by some seconds."""
        module = "tests.provision.aws.bottle.laptop"
        given = (*_PLACE, *words)
        options = [f"{flag}={value}" for flag, value in zip(given[::2], given[1::2], strict=True)]
        return self.laptop(sys.executable, "-m", module, str(ahead), "--yes=True", *options, PYTHONPATH=_ROOT)

    def empty(self, name: str) -> None:
        """Remove a cluster, if a test has left anything of it."""
        if self.ask("left") != NOTHING_LEFT or (self.folder / "state" / name).exists():
            gone = self.cpuft("provision", "down", name, "--region", REGION)
            assert gone.returncode == 0, gone.stderr

    def live(self) -> list[dict[str, Any]]:
        """Return the instances that cost money."""
        return [one for one in self.ask("instances") if one["state"] != "terminated"]

    def disk(self, name: str) -> Path:
        """Return the folder in which an instance's changes to its disk are."""
        return Path(f"/proc/{self.pid}/root{self.folder}/disk/{name}/upper")


@contextmanager
def open_bottle(folder: Path, hosts: bool = True) -> Iterator[Bottle]:
    """Open a new region in `folder`. Without `hosts` (which need root) its instances exist in moto only.

    Its processes end with this process, however that ends, because the server reads from a pipe of this process.
    """
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.provision.aws.bottle.server", str(folder), *(["hosts"] if hosts else [])]
    # This process outlives tests, so it must not count as a process of a test.
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
    """Write wheels that let instances train without installing anything: they point to this machine's environment.

    Instances see this machine's files below their own.
    """
    write_wheels(folder)
    here = sysconfig.get_path("scripts")
    programs = {
        f"machine-99.0.data/scripts/{name}": f'#!/bin/sh\nexec {here}/{name} "$@"\n'
        for name in ("mpirun", "mpiexec.hydra")
    }
    write_wheel(folder, "machine", {"machine.pth": f"{sysconfig.get_path('purelib')}\n", **programs})
