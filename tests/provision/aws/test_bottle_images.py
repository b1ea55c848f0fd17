"""AMIs made of real instances: nothing of the instance is left in them, and clusters start from them."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from cpuft.provision.image import CHECK
from tests.provision.aws.bottle.bottle import NOTHING_LEFT, WORDS, Bottle
from tests.provision.aws.test_bottle import JOB, LAUNCH, QUIET, check
from tests.provision.simulated import needs_root, write_wheel

pytestmark = needs_root
RECIPE = Path(__file__).parents[3] / "ami" / "recipe.yaml"
IMAGE = ("provision", "image", "--aws", *WORDS, "--wheels", "wheels")
LAB = ("provision", "aws", "--name", "lab", *WORDS, "--wheels", "wheels", "--nodes")


LINKS = (
    "import glob, os, sys; [os.symlink(path, to) for path in glob.glob({libraries!r}) for to in "
    "[os.path.join(sys.prefix, 'lib', os.path.basename(path))] if not os.path.lexists(to)]\n"
)
"""A line of a .pth file, which Python runs at every start."""


def bring_libraries(bottle: Bottle) -> None:
    """Link the libraries of MPI and oneCCL of this environment into the new one, where they are searched for."""
    libraries = f"{sys.prefix}/lib/lib*"
    write_wheel(bottle.folder / "wheels", "libraries", {"libraries.pth": LINKS.format(libraries=libraries)})


def write_recipe(bottle: Bottle) -> None:
    """Write our recipe with openssh-server as its only package: the region cannot download packages."""
    (bottle.folder / "ami").mkdir(exist_ok=True)
    packages = "packages:\n  - {name: openssh-server, reason: mpirun starts ranks by ssh}\nenvironment:"
    text = re.sub(r"packages:.*?environment:", packages, RECIPE.read_text(), flags=re.S)
    (bottle.folder / "ami" / "recipe.yaml").write_text(text)


HELLO = """
import os, sys
assert "torch" not in sys.modules
print("rank", os.environ["RANK"])
"""


@pytest.mark.proof
@pytest.mark.parametrize(
    ("job", "file", "text"),
    [
        (("--epochs", "2", *JOB, *QUIET), "record.jsonl", "footer"),
        (("--independent", "--", "hello.py"), "logs/rank-3.out", "rank 3"),
    ],
    ids=("two epochs", "without torch"),
)
def test_an_ami_is_built_used_for_a_job_and_deleted(job: tuple[str, ...], file: str, text: str, bottle: Bottle) -> None:
    (bottle.folder / "hello.py").write_text(HELLO)
    write_recipe(bottle)
    bring_libraries(bottle)
    begun = time.monotonic()
    planned = check(bottle.cpuft(*IMAGE, "--dry-run"))
    assert f"then: {CHECK}" in planned
    assert bottle.ask("calls") == []
    said = bottle.cpuft(*IMAGE, seconds=300)
    assert re.match(r"AMI cpuft-\S+ was made", check(said)), said.stdout
    assert bottle.ask("calls").count("CreateImage") == 1
    left = bottle.ask("left")
    assert NOTHING_LEFT | {"images": left["images"], "snapshots": left["snapshots"]} == left
    assert [len(left[name]) for name in ("images", "snapshots")] == [1, 1]
    check(bottle.cpuft(*IMAGE))
    assert bottle.ask("calls") == []

    rented = bottle.cpuft(*LAB, "4")
    check(rented)
    assert "push " not in rented.stderr
    assert "install the environment" not in rented.stderr
    hosts = bottle.live()
    keys = [line.split()[2] for line in (bottle.folder / "state/lab/known_hosts").read_text().splitlines()]
    assert len(keys) == len({*keys}) == len(hosts) == 4
    identities = [(bottle.disk(one["id"]) / "etc/ssh/ssh_host_ed25519_key.pub").read_text() for one in hosts]
    assert [text.split()[1] for text in identities] == keys
    run = bottle.folder / f"run{len(job)}"
    check(bottle.cpuft("launch", "--cluster", "lab", "--np", "4", "--run-dir", str(run), *job))
    assert text in (run / file).read_text()
    assert "it has cost about" in check(bottle.cpuft("provision", "down", "lab"))
    print(f"builder, image, four hosts, {job}, nothing: {time.monotonic() - begun:.0f} s")

    name = check(bottle.cpuft("provision", "image", "--list", "--region", "us-east-1")).split()[0]
    check(bottle.cpuft("provision", "image", "--delete", name, "--region", "us-east-1"))
    assert bottle.ask("calls").count("DeregisterImage") == 1
    assert bottle.ask("left") == NOTHING_LEFT


@pytest.mark.proof
def test_a_running_job_extends_the_lease_of_its_hosts(bottle: Bottle) -> None:
    check(bottle.cpuft(*LAB, "1", "--lease", "10m", "--lease-limit", "1h"))
    done = bottle.cpuft(*LAUNCH, "--np", "1", "--max-steps", "2", *JOB, *QUIET, "--run-dir", "moved")
    check(done)
    assert "cpuft: the lease of the hosts is renewed while the run lasts, until " in done.stderr
    (one,) = bottle.live()
    said = re.findall("shutdown in (.*) min", bottle.ask("console", one["id"]))
    assert said == ["9", "15"]
    assert "; running jobs can extend it to " in check(bottle.cpuft("provision", "status", "lab"))
    bottle.empty("lab")
