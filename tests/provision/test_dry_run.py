"""Dry runs of commands that need only this machine."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import run_cpuft
from tests.provision.simulated import Simulated, list_states, needs_root, simulate

AMI = Path(__file__).parents[2] / "ami"


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Make temporary folders for everything that a command could write to by default."""
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    return {
        "HOME": f"{tmp_path}/home",
        "TMPDIR": f"{tmp_path}/tmp",
        "XDG_CACHE_HOME": f"{tmp_path}/cache",
        "CPUFT_STATE": f"{tmp_path}/state",
    }


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ("image", "--recipe", "recipe.yaml", "--output", "golden"),
            f"cpuft: download wheels for Python 3.11 on {platform.machine()} into",
        ),
        (("image", "--recipe", "recipe.yaml", "--output", "golden", "--wheels", "wheels"), "debootstrap"),
    ],
    ids=("image", "image from wheels"),
)
def test_a_dry_run_leaves_every_file_as_it_was(
    tmp_path: Path, places: dict[str, str], words: tuple[str, ...], said: str
) -> None:
    text = (AMI / "recipe.yaml").read_text()
    (tmp_path / "recipe.yaml").write_text(text.replace("base:\n", "base:\n  mirror: http://mirror.example/debian\n"))
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a-1.0-py3-none-any.whl").write_text("")
    before = list_states(tmp_path)
    done = run_cpuft("provision", *words, "--dry-run", settings=places)
    assert (done.returncode, done.stderr) == (0, "")
    assert said in done.stdout
    assert list_states(tmp_path) == before


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    with simulate(tmp_path_factory.mktemp("dry"), "--nodes", "1") as made:
        yield made


@needs_root
@pytest.mark.parametrize(
    "more, said",
    [(("--nodes", "2"), "nodes/2/host_key"), (("kill", "1"), "node.sh crash"), (("pause", "1"), "node.sh pause")],
)
def test_a_dry_run_leaves_simulated_hosts_alone(cluster: Simulated, more: tuple[str, ...], said: str) -> None:
    before = list_states(cluster.folder)
    done = cluster.cpuft("provision", "local", "--name", cluster.name, *more, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert list_states(cluster.folder) == before
    assert "  up, " in cluster.cpuft("provision", "status", cluster.name).stdout
