"""Runs that go on without the machine that started them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuft.record import read_record
from tests.provision.simulated import Simulated, needs_root, own_root, simulate

TEXTS = ("--np", "2", "--task", "text", "--train-file", "book.txt", "--max-length", "32", "--precision", "fp32")
QUIET = ("--dropout", "0", "--backend", "gloo", "--no-save-model", "--no-check", "--no-fast-path", "--seed", "7")
QUIET += ("--grad-compression", "none")
STEPS = ("--max-steps", "6", "--eval-every", "3")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    with (
        own_root(tmp_path_factory.mktemp("away")) as image,
        simulate(image.parent, "--nodes", "3", "--image", str(image)) as made,
    ):
        lines = [f"The {word} boat sails past the {word} island in the morning.\n" for word in ("red", "old", "long")]
        (made.folder / "book.txt").write_text("".join(lines) * 60)
        yield made


def start(cluster: Simulated, folder: str, *words: str) -> str:
    """Start a detached run, and return its id."""
    done = cluster.cpuft("launch", "--detach", "--cluster", cluster.name, "--run-dir", folder, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().removeprefix("detached: ")


@needs_root
def test_a_run_goes_on_without_its_launcher_and_is_attached_to_from_elsewhere(
    cluster: Simulated, tmp_path: Path
) -> None:
    whole = cluster.cpuft("launch", "--cluster", cluster.name, *TEXTS, *QUIET, *STEPS, "--run-dir", "whole")
    assert whole.returncode == 0, whole.stderr
    words = ("launch", "--detach", "--cluster", cluster.name, *TEXTS, *QUIET, *STEPS, "--run-dir", "away")
    environ = {**os.environ, "CPUFT_STATE": str(cluster.folder / "state")}
    command = [sys.executable, "-m", "cpuft", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=cluster.folder, env=environ, stdout=pipe, text=True, start_new_session=True
    ) as one:
        assert one.stdout
        run = one.stdout.readline().strip().removeprefix("detached: ")
        os.killpg(one.pid, signal.SIGKILL)
    # Another machine, which has the cluster's key and its hostfile, and knows nothing of the run.
    home, place = tmp_path / "home", tmp_path / "place"
    place.mkdir()
    home.mkdir()
    config = (cluster.folder / "state" / cluster.name / "ssh_config").read_text()
    (place / "config").write_text(config)
    shutil.copy(cluster.folder / "hostfiles" / cluster.name, place / "hosts")
    there = environ | {"HOME": str(home), "CPUFT_STATE": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path)}
    attach = [sys.executable, "-m", "cpuft", "attach", run[:6], "--hostfile", "hosts", "--ssh-config", "config"]
    done = subprocess.run(attach, cwd=place, env=there, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"\nrun: {place}/runs/away\n")
    records = [read_record(str(folder)) for folder in (cluster.folder / "whole", place / "runs" / "away")]
    assert [step.loss for step in records[0].steps] == [step.loss for step in records[1].steps] != []
    assert done.stdout.partition("\n")[0] == whole.stdout.partition("\n")[0]  # the metric
    shown = [re.sub(r"  [0-9.]+ samples/s.*", "", text).splitlines() for text in (whole.stderr, done.stderr)]
    assert [line for line in shown[0] if line.startswith("step ")] == [
        line for line in shown[1] if line.startswith("step ")
    ]
    # The results are where they were fetched to, and nowhere else.
    again = cluster.cpuft("attach", "away")
    assert again.returncode == 0, again.stderr
    assert again.stdout.endswith(f":{place}/runs/away\n")
    assert "step 6/6" in again.stderr
    assert not (cluster.folder / "away" / "record.jsonl").exists()
    assert "/away/" not in cluster.on(1, "find /var/tmp/cpuft-0")
    listed = cluster.cpuft("runs", "--cluster", cluster.name)
    assert re.search(rf"{run} +launch +away .* ended, exit code 0 +\S+:{place}/runs/away\n", listed.stdout), listed


@needs_root
def test_a_stopped_run_saves_a_checkpoint_and_is_resumed_from_here(cluster: Simulated) -> None:
    run = start(cluster, "long", *TEXTS, *QUIET, "--max-steps", "500")
    wait_for_step(cluster, run)
    down = cluster.cpuft("provision", "down", cluster.name)
    assert (down.returncode, run in down.stderr) == (2, True), down.stderr
    assert cluster.cpuft("stop", run).returncode == 0
    ended = cluster.cpuft("attach", "long")
    assert ended.returncode == 75, ended.stderr
    folder = cluster.folder / "long"
    (line,) = re.findall(rf"continue with (cpuft launch --resume {folder})\n", ended.stderr)
    made = len(read_record(str(folder)).steps)
    assert 0 < made < 500
    refused = cluster.cpuft("stop", run)
    assert (refused.returncode, "does not run any more" in refused.stderr) == (2, True)
    resumed = cluster.cpuft(*line.split()[1:], "--time-limit", "6", "--no-check")
    assert f"continue after update {made}" in resumed.stderr or "step " in resumed.stderr, resumed.stderr


@needs_root
def test_a_lost_head_host_is_told_with_the_command_that_resumes(cluster: Simulated) -> None:
    run = start(cluster, "lost", *TEXTS, *QUIET, "--max-steps", "500", "--checkpoint-every", "1")
    wait_for_step(cluster, run, 40)
    cluster.cpuft("provision", "local", "--name", cluster.name, "kill", "1")
    lost = cluster.cpuft("attach", run)
    resume = f"cpuft launch --resume {cluster.folder / 'lost'}"
    assert lost.returncode == 75
    assert resume in lost.stderr, lost.stderr
    listed = cluster.cpuft("runs")
    assert resume in listed.stderr, listed.stderr
    resumed = cluster.cpuft(*resume.split()[1:], "--no-check", "--time-limit", "8")
    steps = [int(step) for step in re.findall(r"^step (\d+)/500", resumed.stderr, re.M)]
    assert steps, resumed.stderr
    assert steps[0] > 1


def wait_for_step(cluster: Simulated, run: str, step: int = 2) -> None:
    """Wait until a detached run has made some updates."""
    limit = time.monotonic() + 120
    while f"step {step}/" not in cluster.cpuft("logs", run).stderr and time.monotonic() < limit:
        time.sleep(0.5)
