"""The gate before engines of others: installed versions decide, and nothing of theirs is imported (CI has none)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.options.fields import ENGINES as NAMES
from cpuft.options.fields import TrainConfig
from cpuft.train.engines import ENGINES, IPEX, check_engine, find_problem, name_packages
from tests.conftest import run_cpuft

MOVE = "use the environment that scripts/check-ipex makes, or leave --engine out"


@pytest.mark.parametrize(
    "engine, versions, machine, problem",
    [
        ("ipex", ("2.8.0", "2.8.0"), "x86_64", ""),
        ("ipex", ("2.8.10", "2.8.0+cpu"), "x86_64", ""),
        ("ipex", ("2.8.0", "2.13.0"), "x86_64", f"--engine ipex needs torch 2.8, and here is 2.13.0: {MOVE}"),
        ("ipex", ("2.8.0", "2.80.0"), "x86_64", f"--engine ipex needs torch 2.8, and here is 2.80.0: {MOVE}"),
        ("ipex", ("", "2.8.0"), "x86_64", f"--engine ipex needs {IPEX} 2.8, and here is none: {MOVE}"),
        ("ipex", ("2.7.0", "2.7.0"), "x86_64", f"--engine ipex needs {IPEX} 2.8, and here is 2.7.0: {MOVE}"),
        (
            "ipex",
            ("", "2.8.0"),
            "aarch64",
            "--engine ipex runs on x86_64 only, and this host is aarch64: leave --engine out",
        ),
        ("deepspeed", ("0.19.8",), "aarch64", ""),
        (
            "deepspeed",
            ("",),
            "x86_64",
            "--engine deepspeed needs deepspeed 0.19, and here is none: "
            "pip install --no-build-isolation 'cpuft[deepspeed]', or leave --engine out",
        ),
        ("torch", (), "riscv64", ""),
    ],
)
def test_where_an_engine_can_train(engine: str, versions: tuple[str, ...], machine: str, problem: str) -> None:
    assert find_problem(engine, dict(zip(name_packages(engine), versions, strict=True)), machine) == problem


def test_every_engine_but_our_own_says_what_it_needs() -> None:
    assert ("torch", *ENGINES) == NAMES
    assert name_packages("torch") == ()


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
    install(tmp_path, IPEX, "2.8.0", monkeypatch)
    check_engine(TrainConfig())
    torch = tmp_path / "torch-2.13.0.dist-info"
    torch.mkdir()
    (torch / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    with pytest.raises(CpuftError, match=r"needs torch 2\.8, and here is 2\.13\.0: "):
        check_engine(TrainConfig(engine="ipex"))
    assert IPEX not in sys.modules


def test_a_launch_with_ipex_where_it_is_not_starts_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, IPEX, "2.7.0", monkeypatch)
    words = ("launch", "--np", "2", "--run-dir", "run", "--no-check", "--engine", "ipex")
    done = run_cpuft(*words, settings={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"cpuft: error: --engine ipex needs {IPEX} 2.8, and here is 2.7.0: {MOVE}\n"
    assert not Path("run").exists()
