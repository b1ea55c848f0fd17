"""The commands of the READMEs that need an AWS account, run in a simulated region."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuft.cli import main
from cpuft.provision.aws.lease import UNTIL_FILE
from tests.provision.aws.region import NOTHING, REGION, Region, left, make_aws, open_region, refuse, say
from tests.provision.aws.test_ami_builder import build
from tests.provision.simulated import write_wheels
from tests.test_readme import RENTED, TEXTS

pytestmark = pytest.mark.real
AMI = Path(__file__).parents[3] / "ami"
AFTER = {command for command in RENTED if re.search("extend|--list|--delete", command)}
"""Commands that need something that exists already."""


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    with pytest.MonkeyPatch.context() as patch, open_region() as opened:
        patch.setenv("CPUFT_STATE", str(tmp_path / "state"))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        patch.setenv("AWS_DEFAULT_REGION", REGION)
        yield opened


def run(capsys: pytest.CaptureFixture[str], line: str, *words: str) -> str:
    """Run a command that must succeed, and return its output."""
    typed = shlex.split(line.partition(" > ")[0], comments=True)[1:]
    with pytest.raises(SystemExit) as ending:
        main([*typed, *words])
    said = capsys.readouterr()
    assert not ending.value.code, said.err
    return said.out


def test_the_readme_has_ten_commands() -> None:
    (block,) = re.findall(r"^```\n(cpuft provision aws --policy.*?)^```", TEXTS["ami/README.md"], re.M | re.S)
    assert len(block.splitlines()) == 10


@pytest.mark.parametrize("line", sorted(RENTED - AFTER))
def test_commands_that_make_something(
    line: str, region: Region, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "ami").mkdir()
    (tmp_path / "ami" / "recipe.yaml").write_text((AMI / "recipe.yaml").read_text())
    said = run(capsys, line, "--ssh-from", "203.0.113.7", "--dry-run")
    assert "ec2:RunInstances" in said or "create-security-group" in said or "download wheels" in said
    assert left(region) == NOTHING
    assert region.mutating == []


def test_commands_that_need_an_existing_cluster(
    region: Region, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lab = make_aws(region, tmp_path, nodes=4)
    lab.make(say, refuse)
    # A login would have written this file.
    (lab.directory / "ssh_config").write_text("# Made by cpuft provision\n")
    (extend,) = {line for line in AFTER if "extend" in line}
    assert run(capsys, extend, "--dry-run").count(f" arm {UNTIL_FILE} ") == 4
    assert run(capsys, "cpuft provision status").count(" running, i-") == 4
    assert "it has cost about" in run(capsys, "cpuft provision down lab")
    assert left(region) == NOTHING


def test_commands_about_amis(region: Region, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_wheels(tmp_path / "wheels")
    build(region, tmp_path, tmp_path / "wheels")
    show, delete = sorted(line for line in AFTER if "image" in line)[::-1]
    name = run(capsys, show).split()[0]
    assert name.startswith("cpuft-")
    assert run(capsys, delete.replace("NAME", name)) == f"AMI {name} was deleted\n"
    assert run(capsys, show) == "cpuft has made no AMI in us-east-1\n"
