"""AMIs: how they are named, found, described and deleted, and what is removed from a host before one is made."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest

from cpuft.errors import CpuftError
from cpuft.plans import format_plan
from cpuft.provision.aws import ami, facts
from cpuft.provision.aws.ami import describe_images, is_ready, name_image, plan_deletion, plan_finish
from cpuft.provision.aws.client import AwsClient, CallStep
from cpuft.provision.image import format_install, read_recipe

RECIPE = read_recipe(str(Path(__file__).parents[3] / "ami" / "recipe.yaml"))


def make_image(number: int, state: str = "available", recipe: str = "a") -> dict[str, Any]:
    """Return an AMI as AWS describes it."""
    return {
        "ImageId": f"ami-{number}",
        "Name": f"cpuft-a-{number}",
        "State": state,
        "CreationDate": f"2026-01-0{number}T10:11:12.000Z",
        "RootDeviceName": "/dev/xvda",
        "BlockDeviceMappings": [
            {"DeviceName": "/dev/xvdb", "Ebs": {"VolumeSize": 99}},
            {"DeviceName": "/dev/xvda", "Ebs": {"SnapshotId": f"snap-{number}", "VolumeSize": 16}},
        ],
        "Tags": [{"Key": "cpuft:image", "Value": recipe}] if recipe else [],
    }


OLD, NEW, COMING = make_image(1), make_image(2), make_image(3, "pending")


def test_the_same_recipe_and_environment_are_the_same_image() -> None:
    assert name_image("d1", "e" * 32) == "cpuft-d1-eeeeeeeeeeee"
    assert len({name_image("d1", "e1"), name_image("d2", "e1"), name_image("d1", "e2")}) == 3


def test_images_are_found_the_oldest_first() -> None:
    class Cloud:
        def query(self, method: str, **parameters: Any) -> dict[str, Any]:
            return {"Images": [NEW, OLD]}

    assert facts.find_images(cast(AwsClient, Cloud()), "tag-key", "cpuft:image") == [OLD, NEW]


def test_the_size_of_an_ami_is_that_of_its_root_disk() -> None:
    assert facts.find_disk_size(OLD) == 16
    assert facts.find_disk_size({"ImageId": "ami-1"}) == 0


def test_the_newest_available_ami_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    client = cast(AwsClient, None)
    monkeypatch.setattr(facts, "read_recipe", lambda path: RECIPE)
    for found, wanted in (((OLD, NEW, COMING), "ami-2"), ((COMING,), "")):
        monkeypatch.setattr(facts, "find_images", lambda *filter, found=found: found)
        assert facts._find_recipe_image(client, "recipe.yaml", "x86_64") == wanted


@pytest.mark.parametrize(("image", "ready"), [(NEW, True), (COMING, False), (None, False)])
def test_an_ami_is_ready_when_it_is_available(image: dict[str, Any] | None, ready: bool) -> None:
    assert is_ready(image, "name") is ready


@pytest.mark.parametrize(
    ("recipe", "state", "said"),
    [
        ("", "available", "AMI ami-1 has the name n, but cpuft did not make it"),
        ("a", "failed", "AMI n could not be made .*: delete it with `cpuft provision image --delete n`"),
    ],
)
def test_an_ami_that_failed_or_that_cpuft_did_not_make_is_refused(recipe: str, state: str, said: str) -> None:
    with pytest.raises(CpuftError, match=said):
        is_ready(make_image(1, state, recipe), "n")


@pytest.mark.parametrize(("wanted", "deleted"), [("ami-1", "ami-1"), ("cpuft-a-2", "ami-2")])
def test_an_ami_is_deleted_with_its_snapshots(wanted: str, deleted: str) -> None:
    plan = plan_deletion((OLD, NEW, COMING), wanted, "us-east-1")
    (call,) = (step for stage in plan.stages for step in stage if isinstance(step, CallStep))
    assert call.method == "deregister_image"
    assert call.parameters == {"ImageId": deleted, "DeleteAssociatedSnapshots": True}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([OLD, NEW], "cpuft has made no AMI 'cpuft-a' in us-east-1: did you mean"),
        ([], "there is nothing to delete"),
    ],
)
def test_only_amis_that_cpuft_made_are_deleted(found: list[Any], said: str) -> None:
    with pytest.raises(CpuftError, match=said):
        plan_deletion(found, "cpuft-a", "us-east-1")


def test_amis_are_listed() -> None:
    assert describe_images((OLD, NEW), "us-east-1") == (
        "cpuft-a-1  ami-1  available, 16 GB, made 2026-01-01 10:11 UTC\n"
        "cpuft-a-2  ami-2  available, 16 GB, made 2026-01-02 10:11 UTC\n"
    )
    assert describe_images((), "us-east-1") == "cpuft has made no AMI in us-east-1\n"


def test_packages_come_through_the_machine_that_rents() -> None:
    plan = plan_finish(RECIPE, "10.0.0.5", ("ssh", "-F", "/s/ssh_config", "10.0.0.5"))
    through, check, seal = (stage[0] for stage in plan.stages)
    assert through.command[:-2] == (
        "ssh",
        "-F",
        "/s/ssh_config",
        "-o",
        "ExitOnForwardFailure=yes",
        "-R",
        "127.0.0.1:3128",
    )
    assert through.command[-2] == "10.0.0.5"
    words = shlex.split(through.command[-1])
    assert (words[:2], words[4:]) == (["sh", "-c"], ["3128", format_install(RECIPE)])
    assert (check.host, check.command[-1]) == ("10.0.0.5", "/opt/cpuft/env/bin/python")
    assert (seal.host, seal.command[-3:]) == ("10.0.0.5", ("/", "/opt/cpuft", "/var/tmp"))
    assert subprocess.run(["bash", "-n"], input=format_plan(plan), text=True, check=True).returncode == 0


def test_this_machine_is_never_cleaned() -> None:
    with pytest.raises(AssertionError, match="these steps must not run on this machine"):
        plan_finish(RECIPE, "10.0.0.5", ())


def test_apt_uses_the_proxy_while_the_script_runs(tmp_path: Path) -> None:
    script = 'cat "$APT_CONFIG"; echo "$APT_CONFIG" >said; exit 7'
    environ = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    words = ["sh", "-c", ami._APT_PROXY, "apt_proxy", "3128", script]
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (
        7,
        'Acquire::http::Proxy "socks5h://127.0.0.1:3128";\nAcquire::https::Proxy "socks5h://127.0.0.1:3128";\n'
        'DPkg::Lock::Timeout "300";\n',
    )
    assert not Path(Path("said").read_text().strip()).exists()


SECRET = "this host's own"
IDENTITY = (
    *("etc/ssh/ssh_host_ecdsa_key", "etc/ssh/ssh_host_ed25519_key.pub", "etc/machine-id", "etc/hostname"),
    *("root/.ssh/authorized_keys", "root/.bash_history", "root/.cache/cpuft/x", "root/.local/state/cpuft/clusters/x"),
    *("home/admin/.ssh/authorized_keys", "home/admin/.python_history", "var/lib/cpuft/until", "var/lib/cpuft/limit"),
    *("usr/local/sbin/cpuft-lease", "etc/systemd/system/cpuft-lease.service", "var/lib/systemd/random-seed"),
    *("var/lib/cloud/instances/i-1/user-data.txt", "var/lib/cloud/data/instance-id", "var/log/cloud-init.log"),
    *("var/log/journal/abc/system.journal", "var/log/auth.log", "var/lib/apt/lists/x", "var/cache/apt/archives/x"),
    *("opt/cpuft/clusters/image1/id_ed25519", "opt/cpuft/wheels/a.whl", "opt/cpuft/install.lock", "var/tmp/cpuft-0/x"),
)
KEPT = ("etc/ssh/sshd_config", "opt/cpuft/env/stamp", "root/.bashrc", "etc/resolv.conf", "usr/local/sbin/other")


@pytest.mark.parametrize("bus", ["file", "link"])
def test_an_image_contains_no_key_no_name_and_no_lease(bus: str, tmp_path: Path) -> None:
    top = tmp_path / "top"
    for name in (*IDENTITY, *KEPT):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(SECRET)
    wanted = top / "etc/systemd/system/multi-user.target.wants"
    wanted.mkdir()
    (wanted / "cpuft-lease.service").symlink_to(top / "etc/systemd/system/cpuft-lease.service")
    (top / "var/lib/cloud/instance").symlink_to(top / "var/lib/cloud/instances/i-1")
    (top / "var/lib/dbus").mkdir()
    makes: dict[str, Any] = {
        "file": lambda path: path.write_text(SECRET),
        "link": lambda path: path.symlink_to(top / "etc/machine-id"),
    }
    makes[bus](top / "var/lib/dbus/machine-id")
    environ = {"PATH": os.environ["PATH"], "HOME": str(top / "root")}
    words = ["sh", "-c", ami._CLEAN, "seal", f"{top}/", "/opt/cpuft", "/var/tmp"]
    for _ in range(2):
        done = subprocess.run(words, env=environ, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    left = [path for path in top.rglob("*") if not stat.S_ISDIR(path.lstat().st_mode)]
    assert {str(path.relative_to(top)) for path in left if path.exists() and SECRET in path.read_text()} == {*KEPT}
    assert [path for path in left if path.is_symlink() and not path.exists()] == []
    assert (top / "etc/machine-id").read_text() == ""
