"""Nodes of a job, as AWS Batch would start them: each with its variables, none with ssh."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from cpuft.schedulers.aws_batch import AwsBatch, BatchOptions
from cpuft.schedulers.base import NODE_COMMAND, JobLaunch

SECRET = "0123456789abcdef" * 2
_START = "import sys; from cpuft.schedulers.job_node import run_node as run; import os"
_START += "; sys.exit(run(sys.argv[2:], os.environ, int(sys.argv[1])))"


def command_of(launch: JobLaunch, cpuft: str, folder: Path, name: str = "x") -> list[str]:
    """What a container starts, behind the entry and with a folder of the test's for /work, by the job's definition."""
    config = BatchOptions(name=name, image="i", queue="q", secret="s", role="r")
    calls = yaml.safe_load(AwsBatch().render(config, launch, cpuft))
    container = calls["register_job_definition"]["nodeProperties"]["nodeRangeProperties"][0]["container"]
    assert container["command"][: len(NODE_COMMAND)] == list(NODE_COMMAND)
    return [str(folder), *container["command"][len(NODE_COMMAND) :]]


def variables_of(service: str, index: int, count: int, address: str) -> dict[str, str]:
    """By which a service tells a node its place."""
    if service == "dstack":
        known = {"DSTACK_RUN_NAME": "a-run", "DSTACK_MASTER_NODE_IP": address}
        return known | {"DSTACK_NODE_RANK": str(index), "DSTACK_NODES_NUM": str(count)}
    if service == "skypilot":
        known = {"SKYPILOT_TASK_ID": "sky-managed-2026-11-29-06-00-00_a_12-0", "SKYPILOT_NODE_RANK": str(index)}
        addresses = "\n".join([address, *(f"10.0.0.{number}" for number in range(1, count))])
        return known | {"SKYPILOT_NUM_NODES": str(count), "SKYPILOT_NODE_IPS": addresses}
    return {
        "AWS_BATCH_JOB_ID": f"7f#{index}",
        "AWS_BATCH_JOB_ATTEMPT": "1",
        "AWS_BATCH_JOB_NODE_INDEX": str(index),
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
        "AWS_BATCH_JOB_NUM_NODES": str(count),
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": address,
    }


@dataclass
class Job:
    """A job's nodes, of which each is started once, here or in `inside` (words before a command, by a node's index)."""

    folder: Path
    address: str
    port: int
    command: Sequence[str]
    count: int = 3
    seconds: int = 60
    service: str = "batch"
    """Whose variables the nodes get."""
    inside: Callable[[int], Sequence[str]] = lambda index: ()
    nodes: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def start(self, index: int, **more: str) -> None:
        environ = dict(os.environ) | {
            **variables_of(self.service, index, self.count, self.address),
            "CPUFT_JOB_TOKEN": SECRET,
            "CPUFT_MEET_SECONDS": str(self.seconds),
            "OMP_NUM_THREADS": "1",  # three hosts are one machine here
            "PYTHONPATH": str(Path(__file__).parents[2]),
            **more,
        }
        words = (*self.inside(index), sys.executable, "-c", _START, str(self.port), *self.command)
        with open(self.folder / f"node-{index}", "w", encoding="utf-8") as log:
            self.nodes[index] = subprocess.Popen(words, env=environ, stdout=log, stderr=log, text=True)

    def send(self, index: int, number: int) -> None:
        """A signal to a node's first process; nsenter, which waits for it, would not pass it on."""
        pid = self.nodes[index].pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
        os.kill(int(children[0]) if self.inside(index) else pid, number)

    def end(self, seconds: float = 60.0) -> list[int]:
        """All nodes' exit codes, in their order."""
        return [node.wait(seconds) for _, node in sorted(self.nodes.items())]

    def said(self, index: int) -> str:
        return (self.folder / f"node-{index}").read_text(encoding="utf-8")


@contextmanager
def open_job(job: Job, nodes: Sequence[int] = (0, 1, 2)) -> Iterator[Job]:
    try:
        for index in nodes:
            job.start(index)
        yield job
    finally:
        for node in job.nodes.values():
            if node.poll() is None:
                os.kill(node.pid, signal.SIGKILL)
            node.wait(20)


def shell(text: str, folder: Path) -> list[str]:
    """A folder to work in, and a shell line as the job's command."""
    return [str(folder), "sh", "-c", text]


def wait_until_said(job: Job, pattern: str, seconds: float = 150.0) -> None:
    """By the main node, while it runs."""
    end = time.monotonic() + seconds
    while not re.search(pattern, job.said(0)):
        assert (time.monotonic() < end, job.nodes[0].poll()) == (True, None), job.said(0)
        time.sleep(0.05)
