import configparser
import io
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.plans import Plan
from cpuft.provision.image import (
    ImageFacts,
    format_install,
    gather_image,
    plan_image,
    read_recipe,
    read_stamp,
    write_stamp,
)
from cpuft.provision.options import HostsConfig
from cpuft.provision.wheels import Supply, Wheel, make_own_wheel, make_stamp

AMI = Path(__file__).parents[2] / "ami"


def test_the_install_script_is_generated_from_the_recipe() -> None:
    assert (AMI / "install.sh").read_text() == format_install(read_recipe(str(AMI / "recipe.yaml")))


@pytest.mark.parametrize("text", ["", "[]", "base: {}", "a: [", "base: {suite: x}\npackages: []\nfiles: []\n"])
def test_a_file_that_is_no_recipe_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(CpuftError) as caught:
        read_recipe(str(tmp_path / "recipe.yaml"))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("compare it with ami/recipe.yaml")


@pytest.mark.parametrize(
    "change",
    [
        ("suite: bookworm", "suite: [bookworm]"),
        ("name: g++", "name: {g: 1}"),
        ("reason: runs the training environment", "because: it does"),
        ("path: /etc/sysctl.d/90-cpuft.conf", "path: [1, 2]"),
        ("prefix: /opt/cpuft", "prefix: /opt/../home"),
        ("prefix: /opt/cpuft", "prefix: 5"),
        ("suite: bookworm", 'suite: "bookworm\\nRUN touch /tmp/x"'),
        ("reason: runs the training environment", 'reason: "runs\\nRUN touch /tmp/x"'),
        ("base:", "base: " + "[" * 5000 + "\nother:"),
    ],
)
def test_a_recipe_with_wrong_types_is_refused_in_one_line(tmp_path: Path, change: tuple[str, str]) -> None:
    text = (AMI / "recipe.yaml").read_text()
    (tmp_path / "recipe.yaml").write_text(text.replace(*change, 1))
    with pytest.raises(CpuftError, match=r"^recipe .* cannot be used \(.*\): compare it with ami/recipe.yaml$"):
        read_recipe(str(tmp_path / "recipe.yaml"))


def test_numbers_in_a_recipe_are_read_as_text(tmp_path: Path) -> None:
    text = (AMI / "recipe.yaml").read_text()
    (tmp_path / "recipe.yaml").write_text(text.replace("suite: bookworm", "suite: 12").replace("name: g++", "name: 5"))
    recipe = read_recipe(str(tmp_path / "recipe.yaml"))
    assert (recipe.base.suite, recipe.packages[1].name) == ("12", "5")
    assert "need 5\n" in format_install(recipe)


def test_the_recipe_names_no_mirror() -> None:
    assert "://" not in (AMI / "recipe.yaml").read_text()
    assert read_recipe(str(AMI / "recipe.yaml")).base.mirror == ""


RECIPE = read_recipe(str(AMI / "recipe.yaml"))
FACTS = ImageFacts("debootstrap", Supply(()))
BUILD = plan_image(RECIPE, "/images/a", FACTS).stages


def run_step(number: int, root: Path) -> subprocess.CompletedProcess[str]:
    """Run a step of a build whose unfinished image is `root`."""
    (step,) = BUILD[number]
    words = [word.replace("/images", str(root.parent)) for word in step.command]
    return subprocess.run(words, input=step.stdin, capture_output=True, text=True, timeout=20)


def test_a_build_replaces_only_an_unfinished_build(tmp_path: Path) -> None:
    root = tmp_path / "a.new"
    (root / "home").mkdir(parents=True)
    with pytest.raises(CpuftError, match=r"/a\.new is not cpuft's: move it away, or give another --output$"):
        gather_image(RECIPE, str(tmp_path / "a"), "", {"XDG_CACHE_HOME": str(tmp_path)})
    (root / "home").rmdir()
    root.rmdir()
    for _ in range(2):
        assert [run_step(number, root).returncode for number in (0, 1)] == [0, 0]
        assert [str(path.relative_to(root)) for path in sorted(root.rglob("*"))] == ["etc", "etc/cpuft-image.json"]
        gather_image(RECIPE, str(tmp_path / "a"), "", {"XDG_CACHE_HOME": str(tmp_path)})
        (root / "usr").mkdir()


def test_cleaning_removes_files_in_the_image_only(tmp_path: Path) -> None:
    """Outside of a chroot, a symbolic link in the image leads to a file of this machine."""
    root, outside = tmp_path / "a.new", tmp_path / "outside"
    for folder in (outside / "cache", root / "etc", root / "var" / "cache" / "apt", root / "root"):
        folder.mkdir(parents=True)
    (outside / "resolv.conf").write_text("this machine's")
    (root / "etc" / "resolv.conf").symlink_to(outside / "resolv.conf")
    (root / "var" / "cache" / "apt" / "archives").mkdir()
    assert run_step(-2, root).returncode == 0
    assert list((root / "var" / "cache" / "apt").iterdir()) == []
    assert (root / "etc" / "resolv.conf").read_text() == ""
    (root / "root" / ".cache").symlink_to(outside / "cache")
    assert run_step(-2, root).returncode == 1
    assert sorted(path.name for path in outside.rglob("*")) == ["cache", "resolv.conf"]
    assert (outside / "resolv.conf").read_text() == "this machine's"


WHEELS = (
    Wheel("/images/a.new/opt/cpuft/wheels/cpuft-1.whl", "cpuft-1-py3-none-any.whl", "0"),
    Wheel("/w/pip-26.whl", "pip-26-py3-none-any.whl", "1"),
    Wheel("/w/a.whl", "a-1.0-py3-none-any.whl", "2"),
)


def test_an_image_is_built_beside_its_place_without_host_keys() -> None:
    plan = plan_image(RECIPE, "/images/a", replace(FACTS, supply=Supply(WHEELS)))
    steps = [stage[0] for stage in plan.stages]
    here = sys.executable
    programs = ["sh", here, "debootstrap", here, "install", "chroot", here, "unshare", "sh", here]
    assert [step.command[0] for step in steps] == programs
    assert steps[2].command[-2:] == ("bookworm", "/images/a.new")
    assert steps[4].command[-2:] == ("/w/pip-26.whl", "/w/a.whl")
    pins = ("cpuft==1", "a==1.0")
    assert steps[5].command[4:] == ("/opt/cpuft", make_stamp(pins, WHEELS), *pins)
    assert "ssh_host_*" in steps[-2].command[2]
    told = json.loads(steps[-1].command[-1])
    assert (told["recipe"], told["wheels"]) == (RECIPE.digest, sorted(pins))


def test_packages_come_from_the_mirror_of_the_recipe() -> None:
    recipe = replace(RECIPE, base=replace(RECIPE.base, mirror="http://mirror.example/debian"))
    steps = [stage[0] for stage in plan_image(recipe, "/images/a", replace(FACTS, supply=Supply(WHEELS))).stages]
    assert steps[2].command[-2:] == ("/images/a.new", "http://mirror.example/debian")


def test_a_finished_image_is_not_built_again() -> None:
    supply = Supply(WHEELS)
    stamp = {"format": 1, "recipe": RECIPE.digest, "environment": make_stamp(("cpuft==1", "a==1.0"), WHEELS)}
    assert plan_image(RECIPE, "/images/a", replace(FACTS, supply=supply, stamp=stamp)) == Plan()
    for change in ({"recipe": "other"}, {"environment": "other"}):
        with pytest.raises(CpuftError, match=r"^/images/a was not made from this recipe"):
            plan_image(RECIPE, "/images/a", replace(FACTS, supply=supply, stamp=stamp | change))


def test_the_image_and_servers_keep_the_environment_at_the_same_path() -> None:
    assert read_recipe(str(AMI / "recipe.yaml")).environment.prefix == HostsConfig().prefix


def test_each_image_has_contents_of_its_own(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        (tmp_path / f"{name}.new" / "etc").mkdir(parents=True)
        write_stamp(tmp_path / name, {"environment": "e"})
        found.append(read_stamp(tmp_path / name))
    assert [one["environment"] for one in found] == ["e", "e"]
    assert found[0]["contents"] != found[1]["contents"]


def test_an_installed_wheel_contains_the_recipe() -> None:
    """It is used when the working directory has no folder ami."""
    assert read_recipe("ami/recipe.yaml") == read_recipe(str(AMI / "recipe.yaml"))
    with zipfile.ZipFile(io.BytesIO(make_own_wheel("x86_64")[1])) as wheel:
        assert wheel.read("cpuft/provision/recipe.yaml") == (AMI / "recipe.yaml").read_bytes()
    settings = configparser.ConfigParser()
    settings.read(AMI.parent / "setup.cfg")
    assert "*.yaml" in settings["options.package_data"]["cpuft.provision"]
    with pytest.raises(CpuftError, match=r"^recipe mine\.yaml cannot be used"):
        read_recipe("mine.yaml")
