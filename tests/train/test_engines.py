"""The gate before engines of others: installed versions decide, and nothing of theirs is imported (CI has none)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cpuft.config.train import ENGINES as NAMES
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.train.engines import ENGINES, IPEX, ORT, check_engine, find_problem, name_packages
from tests.conftest import run_cpuft

MOVE = "use the environment that scripts/check-ipex makes, or leave --engine out"
MOVE_ORT = MOVE.replace("ipex", "ort")


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
            "use the environment that scripts/check-deepspeed makes, or leave --engine out",
        ),
        ("ort", ("1.19.2", "2.3.1+cu121"), "x86_64", ""),
        ("ort", ("1.19.2", "2.13.0"), "x86_64", f"--engine ort needs torch 2.3, and here is 2.13.0: {MOVE_ORT}"),
        ("ort", ("", "2.3.1"), "x86_64", f"--engine ort needs {ORT} 1.19, and here is none: {MOVE_ORT}"),
        (
            "ort",
            ("1.19.2", "2.3.1"),
            "aarch64",
            "--engine ort runs on x86_64 only, and this host is aarch64: leave --engine out",
        ),
    ],
)
def test_where_an_engine_can_train(engine: str, versions: tuple[str, ...], machine: str, problem: str) -> None:
    assert find_problem(engine, dict(zip(name_packages(engine), versions, strict=True)), machine) == problem


def test_every_engine_but_our_own_says_what_it_needs() -> None:
    assert ("torch", *ENGINES) == NAMES
    assert name_packages("torch") == ()


def describe(folder: Path, package: str, version: str) -> None:
    """Let a folder's packages be of that version, by what is said of them."""
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def install(folder: Path, package: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a package of that name and version before all others: its import raises what IPEX's does."""
    describe(folder, package, version)
    (folder / f"{package}.py").write_text("import os\nos.exit(127)\n")
    monkeypatch.syspath_prepend(str(folder))


def test_ipex_beside_another_torch_is_refused_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, IPEX, "2.8.0", monkeypatch)
    check_engine(TrainConfig())
    describe(tmp_path, "torch", "2.13.0")
    with pytest.raises(CpuftError, match=r"needs torch 2\.8, and here is 2\.13\.0: "):
        check_engine(TrainConfig(engine="ipex"))
    assert IPEX not in sys.modules


def test_ort_trains_where_it_was_compiled_for_its_torch_and_never_with_that_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    describe(tmp_path, ORT, "1.19.2")
    describe(tmp_path, "torch", "2.3.1+cpu")
    extensions = tmp_path / "onnxruntime/training/ortmodule/torch_cpp_extensions"
    extensions.mkdir(parents=True)
    with pytest.raises(CpuftError) as refused:
        check_engine(TrainConfig(engine="ort"))
    assert str(refused.value) == f"--engine ort has not been compiled for its torch: {MOVE_ORT}"
    (extensions / "aten_op_executor.cpython-311-x86_64-linux-gnu.so").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTMODULE_FALLBACK_POLICY", "put back afterwards")
        patch.delenv("ORTMODULE_FALLBACK_POLICY")
        check_engine(TrainConfig(engine="ort"))
        assert os.environ["ORTMODULE_FALLBACK_POLICY"] == "FALLBACK_DISABLE"


def test_a_launch_with_ipex_where_it_is_not_starts_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, IPEX, "2.7.0", monkeypatch)
    words = ("launch", "--np", "2", "--run-dir", "run", "--no-check", "--engine", "ipex")
    done = run_cpuft(*words, settings={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"cpuft: error: --engine ipex needs {IPEX} 2.8, and here is 2.7.0: {MOVE}\n"
    assert not Path("run").exists()
