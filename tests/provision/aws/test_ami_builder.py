"""Making AMIs in a simulated region: once, on an instance that is terminated whatever happens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpuft.errors import CpuftError
from cpuft.provision.aws.ami import AmiBuilder, delete_image, list_images
from cpuft.provision.aws.client import read_tags
from cpuft.provision.options import ImageConfig
from tests.provision.aws.region import (
    NOTHING,
    REGION,
    KilledError,
    Region,
    client,
    left,
    live,
    make,
    refuse,
    say,
)
from tests.provision.simulated import write_wheels

pytestmark = pytest.mark.real
RECIPE = Path(__file__).parents[3] / "ami" / "recipe.yaml"
CALLS = [
    "create_security_group",
    "authorize_security_group_ingress",
    "revoke_security_group_egress",
    "authorize_security_group_egress",
    "run_instances",
    "create_image",
    "terminate_instances",
    "delete_security_group",
]
"""Changing calls of making an AMI, in order."""


@pytest.fixture(autouse=True)
def _images_take_their_time(region: Region) -> None:
    region.lingers = True


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels") / "wheels"
    write_wheels(folder)
    return folder


def make_builder(region: Region, folder: Path, wheels: Path, **options: Any) -> AmiBuilder:
    config = ImageConfig(recipe=str(RECIPE), wheels=str(wheels), aws=True, region=REGION, yes=True)
    return AmiBuilder(replace(config, **options), {"CPUFT_STATE": str(folder / "state")}, region.services())


def build(region: Region, folder: Path, wheels: Path, **options: Any) -> str:
    return make_builder(region, folder, wheels, **options).make(say, refuse)


def find_made() -> tuple[list[str], list[str]]:
    """Return the names of AMIs and of snapshots that have our tag."""
    filters = [{"Name": "tag-key", "Values": ["cpuft:image"]}]
    images = client().describe_images(Owners=["self"], Filters=filters)["Images"]
    snapshots = client().describe_snapshots(OwnerIds=["self"], Filters=filters)["Snapshots"]
    return [one["Name"] for one in images], [read_tags(one)["Name"] for one in snapshots]


def test_a_dry_run_makes_no_call_that_changes_anything(region: Region, tmp_path: Path, wheels: Path) -> None:
    plan = make_builder(region, tmp_path, wheels).show()
    assert region.mutating == []
    assert "1 x m7i.xlarge on demand" in plan.notes[0]
    assert [note for note in plan.notes if note.startswith("then: ")][-1].startswith("then: terminate the instance")
    assert [*tmp_path.iterdir()] == []


def test_an_image_is_made_once_and_instances_start_from_it(region: Region, tmp_path: Path, wheels: Path) -> None:
    said = build(region, tmp_path, wheels)
    assert region.mutating == CALLS
    ((name,), (disk,)) = find_made()
    assert name == disk
    assert said == f"AMI {name} was made; next: cpuft provision aws --region {REGION}"
    assert left(region) == NOTHING
    assert [*(tmp_path / "state").iterdir()] == []

    region.calls.clear()
    assert build(region, tmp_path / "elsewhere", wheels).startswith(f"AMI {name} exists already")
    assert make_builder(region, tmp_path, wheels).show().stages == ()
    assert region.mutating == []

    make(region, tmp_path, nodes=2, image=str(RECIPE))
    (image,) = client().describe_images(Owners=["self"], Filters=[{"Name": "name", "Values": [name]}])["Images"]
    assert {one["ImageId"] for one in live()} == {image["ImageId"]}


def test_another_image_is_used_where_one_is_named_or_none_was_made(
    region: Region, tmp_path: Path, wheels: Path
) -> None:
    make(region, tmp_path, nodes=1, image=str(RECIPE))
    build(region, tmp_path, wheels)
    make(region, tmp_path, name="other", nodes=1, image=region.image)
    assert {one["ImageId"] for one in live()} == {region.image}


def some(*names: str) -> list[Any]:
    """Return all calls; those that are not in `names` are tried by the long tests only."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.proof) for name in CALLS]


@pytest.mark.parametrize("call", some("run_instances", "create_image")[: CALLS.index("terminate_instances")])
def test_an_instance_that_makes_an_image_ends_whatever_happens(
    call: str, region: Region, tmp_path: Path, wheels: Path
) -> None:
    """As on Ctrl-C at any time. At most one AMI is left."""
    region.kill = (CALLS.index(call), "after")
    with pytest.raises(KilledError):
        build(region, tmp_path, wheels)
    assert left(region) == NOTHING
    assert len(find_made()[0]) == (call == "create_image")


@pytest.mark.parametrize("call", some("run_instances", "create_image", "terminate_instances"))
def test_what_a_killed_builder_left_is_removed_by_the_next_one(
    call: str, region: Region, tmp_path: Path, wheels: Path
) -> None:
    region.kill, region.outright = (CALLS.index(call), "after"), True
    with pytest.raises(KilledError):
        build(region, tmp_path, wheels)
    assert region.mutating == CALLS[: CALLS.index(call) + 1]
    region.kill, region.outright, region.dead = (-1, ""), False, False
    build(region, tmp_path, wheels)
    assert left(region) == NOTHING
    assert [*(tmp_path / "state").iterdir()] == []
    ((name,), (disk,)) = find_made()
    assert name == disk


@pytest.mark.parametrize("faults", [["InternalError"], ["ServiceUnavailable", "InternalError"]])
def test_an_answer_that_was_lost_makes_no_second_image(
    faults: list[str], region: Region, tmp_path: Path, wheels: Path
) -> None:
    region.image_faults = faults
    build(region, tmp_path, wheels)
    assert [len(names) for names in find_made()] == [1, 1]
    assert left(region) == NOTHING


def test_an_ami_is_deleted_with_its_snapshot(region: Region, tmp_path: Path, wheels: Path) -> None:
    build(region, tmp_path, wheels)
    ((name,), _) = find_made()
    assert list_images(REGION, region.services()).startswith(f"{name}  ami-")
    region.calls.clear()
    assert len(delete_image(name, REGION, True, say, region.services()).stages) == 1
    assert region.mutating == []
    delete_image(name, REGION, False, say, region.services())
    assert find_made() == ([], [])
    assert list_images(REGION, region.services()) == "cpuft has made no AMI in us-east-1\n"
    with pytest.raises(CpuftError, match=f"cpuft has made no AMI '{region.image}' in us-east-1"):
        delete_image(region.image, REGION, False, say, region.services())


def test_an_instance_that_another_machine_uses_is_left_alone(region: Region, tmp_path: Path, wheels: Path) -> None:
    builder = make_builder(region, tmp_path / "there", wheels)
    builder.cluster.make(say, refuse)
    region.calls.clear()
    with pytest.raises(
        CpuftError,
        match=r"another machine is making this AMI: .* with `cpuft provision down image",
    ):
        build(region, tmp_path / "here", wheels)
    assert region.mutating == []


def test_an_ami_of_that_name_that_cpuft_did_not_make_is_left_alone(
    region: Region, tmp_path: Path, wheels: Path
) -> None:
    build(region, tmp_path, wheels)
    ((name,), _) = find_made()
    delete_image(name, REGION, False, say, region.services())
    client().register_image(Name=name)
    region.calls.clear()
    with pytest.raises(CpuftError, match=f"has the name {name}, but cpuft did not make it: deregister it"):
        build(region, tmp_path, wheels)
    assert region.mutating == []


def test_nothing_is_rented_when_the_user_refuses_the_price(region: Region, tmp_path: Path, wheels: Path) -> None:
    with pytest.raises(CpuftError, match=r"nothing was rented: .* The price: 1 x m7i.xlarge on demand"):
        make_builder(region, tmp_path, wheels, yes=False).make(say, lambda question: False)
    assert region.mutating == []


def test_waiting_for_an_ami_has_a_time_limit(region: Region, tmp_path: Path, wheels: Path) -> None:
    builder = make_builder(region, tmp_path, wheels)
    builder.services = replace(builder.services, sleep=lambda seconds: setattr(region, "seconds", region.seconds + 600))
    with pytest.raises(CpuftError, match=r"is not ready after an hour: run the command again"):
        builder.make(say, refuse)
    assert left(region) == NOTHING


def test_only_debian_12_becomes_an_ami(region: Region, tmp_path: Path, wheels: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.read_text().replace("suite: bookworm", "suite: trixie"))
    with pytest.raises(CpuftError, match=r"AMIs are made from Debian bookworm only: set the suite in .*recipe.yaml"):
        make_builder(region, tmp_path, wheels, recipe=str(path))
