from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.provision.image import hash_contents, plan_image
from cpuft.provision.options import HostsConfig
from cpuft.provision.recipe import format_install, read_recipe
from cpuft.provision.wheels import Wheel, make_stamp

AMI = Path(__file__).parents[2] / "ami"


def test_the_install_script_is_the_recipes() -> None:
    assert (AMI / "install.sh").read_text() == format_install(read_recipe(str(AMI / "recipe.yaml")))


@pytest.mark.parametrize("text", ["", "[]", "base: {}", "a: [", "base: {suite: x}\npackages: []\nfiles: []\n"])
def test_what_is_no_recipe_is_said_in_a_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(CpuftError) as caught:
        read_recipe(str(tmp_path / "recipe.yaml"))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("compare it with ami/recipe.yaml")


def test_an_image_is_built_beside_its_place_without_host_keys() -> None:
    wheels = (Wheel("/w/pip-26.whl", "pip-26-py3-none-any.whl", "1"), Wheel("/w/a.whl", "a-1.0-py3-none-any.whl", "2"))
    plan = plan_image(read_recipe(str(AMI / "recipe.yaml")), "/images/a", "debootstrap", wheels)
    steps = [stage[0] for stage in plan.stages]
    assert [step.command[0] for step in steps] == ["rm", "debootstrap", "install", "chroot", "sh", "unshare", "sh"]
    assert steps[1].command[-2] == "/images/a.new"
    assert steps[3].command[4:] == ("/opt/cpuft", make_stamp(("a==1.0",), wheels), "a==1.0")
    assert "ssh_host_*" in steps[-1].command[2]


def test_the_image_and_servers_keep_the_environment_at_the_same_path() -> None:
    assert read_recipe(str(AMI / "recipe.yaml")).environment.prefix == HostsConfig().prefix


def test_contents_are_hashed_by_name_mode_and_text(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "var" / "log").mkdir(parents=True)
    path = tmp_path / "etc" / "a"
    path.write_text("1")
    first = hash_contents(tmp_path)
    (tmp_path / "var" / "log" / "build").write_text("when it was built")
    assert hash_contents(tmp_path) == first
    path.chmod(0o600)
    assert hash_contents(tmp_path) != first
