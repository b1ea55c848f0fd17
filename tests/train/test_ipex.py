"""The gate before IPEX: installed versions decide, and nothing of IPEX is imported (CI has none)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.options.fields import TrainConfig
from cpuft.train.ipex import PACKAGE, check_engine, find_problem
from tests.conftest import run_cpuft

IPEX = TrainConfig(engine="ipex")
MOVE = "use the environment that scripts/check-ipex makes, or leave --engine out"


@pytest.mark.parametrize(
    "config, ipex, torch, machine, problem",
    [
        (IPEX, "2.8.0", "2.8.0", "x86_64", ""),
        (IPEX, "2.8.10", "2.8.0+cpu", "x86_64", ""),
        (IPEX, "2.8.0", "2.13.0", "x86_64", f"--engine ipex needs torch 2.8, and here is 2.13.0: {MOVE}"),
        (IPEX, "2.8.0", "2.80.0", "x86_64", f"--engine ipex needs torch 2.8, and here is 2.80.0: {MOVE}"),
        (IPEX, "", "2.8.0", "x86_64", f"--engine ipex needs {PACKAGE} 2.8, and here is none: {MOVE}"),
        (IPEX, "2.7.0", "2.7.0", "x86_64", f"--engine ipex needs {PACKAGE} 2.8, and here is 2.7.0: {MOVE}"),
        (
            IPEX,
            "",
            "2.8.0",
            "aarch64",
            "--engine ipex runs on x86_64 only, and this host is aarch64: leave --engine out",
        ),
        (
            TrainConfig(engine="ipex", plain=True),
            "2.8.0",
            "2.8.0",
            "x86_64",
            "--engine ipex excludes --plain and --compile: leave either it or them out",
        ),
        (
            TrainConfig(engine="ipex", compile=True),
            "2.8.0",
            "2.8.0",
            "x86_64",
            "--engine ipex excludes --plain and --compile: leave either it or them out",
        ),
        (
            TrainConfig(engine="ipex", sync_every=2),
            "2.8.0",
            "2.8.0",
            "x86_64",
            "--sync-every cannot average the fp32 weights that IPEX keeps to itself: leave it or --engine out",
        ),
    ],
)
def test_where_ipex_can_train(config: TrainConfig, ipex: str, torch: str, machine: str, problem: str) -> None:
    assert find_problem(config, {PACKAGE: ipex, "torch": torch}, machine) == problem


def install(folder: Path, package: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a package of that name and version before all others: its import raises what IPEX's does."""
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (folder / f"{package}.py").write_text("import os\nos.exit(127)\n")
    monkeypatch.syspath_prepend(str(folder))


def test_ipex_beside_another_torch_is_refused_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, PACKAGE, "2.8.0", monkeypatch)
    check_engine(TrainConfig())
    torch = tmp_path / "torch-2.13.0.dist-info"
    torch.mkdir()
    (torch / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    with pytest.raises(CpuftError, match=r"needs torch 2\.8, and here is 2\.13\.0: "):
        check_engine(IPEX)
    assert PACKAGE not in sys.modules


def test_a_launch_with_ipex_where_it_is_not_starts_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, PACKAGE, "2.7.0", monkeypatch)
    words = ("launch", "--np", "2", "--run-dir", "run", "--no-check", "--engine", "ipex")
    done = run_cpuft(*words, settings={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"cpuft: error: --engine ipex needs {PACKAGE} 2.8, and here is 2.7.0: {MOVE}\n"
    assert not Path("run").exists()
