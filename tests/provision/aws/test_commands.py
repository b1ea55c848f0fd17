"""`cpuft provision aws` and `image --aws` as a user types them: bad input, prices, permissions, images."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpuft.files import write_text
from cpuft.hosts.registry import FILE_NAME, Entry, format_entry
from cpuft.provision.aws.ami import AmiBuilder, delete_image, list_images
from cpuft.provision.aws.client import POLICY, AwsClient
from cpuft.provision.aws.facts import find_host_key, parse_instances
from cpuft.provision.options import ImageConfig
from tests.conftest import call_cpuft
from tests.provision.aws.region import (
    NOTHING,
    REGION,
    Region,
    client,
    left,
    live,
    make_aws,
    open_region,
    refuse,
    say,
)
from tests.provision.aws.test_client import list_actions
from tests.provision.simulated import write_wheels

pytestmark = pytest.mark.real
RECIPE = Path(__file__).parents[3] / "ami" / "recipe.yaml"
ASKED = ("provision", "aws", "--name", "lab", "--nodes", "2", "--ssh-from", "203.0.113.7", "--yes")


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    with pytest.MonkeyPatch.context() as patch, open_region() as opened:
        patch.setenv("CPUFT_STATE", str(tmp_path / "state"))
        yield opened


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--region", REGION, "--type", "m7i.9xlarge"),
            "region us-east-1 has no instance type 'm7i.9xlarge': did you mean m7i.xlarge or m7i.8xlarge",
        ),
        (("--region", REGION, "--type", "'"), 'region us-east-1 has no instance type "\'": choose one of'),
        (("--region", REGION, "--zone", "us-east-1z"), "region us-east-1 has no zone 'us-east-1z' that offers m7i"),
        (
            ("--region", REGION, "--zone", "us-east-1e"),
            "region us-east-1 has no zone 'us-east-1e' that offers m7i.8xlarge: did you mean",
        ),
        (
            ("--region", REGION, "--image", "ami-00000000000000000"),
            "region us-east-1 has no AMI 'ami-00000000000000000' that you can use",
        ),
        (("--region", REGION, "--image", "debian"), "region us-east-1 has no AMI 'debian' that you can use"),
        (("--region", REGION, "--lease", "1y"), "--lease '1y' is not a valid time: give 10m to 30d"),
        (("--region", REGION, "--ssh-from", "0.0.0.0/0"), "--ssh-from 0.0.0.0/0 would let almost everybody reach ssh"),
        (("--region", "us-east-9"), "AWS has no region 'us-east-9': did you mean us-east-2"),
        ((), "no AWS region is given: add --region, such as --region us-east-1"),
        (("--region", REGION, "--name", "A"), "'A' is not a valid cluster name"),
        (
            ("--region", REGION, "--no-yes"),
            "nothing was rented: answer yes at a terminal, or add --yes. The price: 2 x m7i",
        ),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...], said: str, region: Region, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, output, errors = call_cpuft(capsys, *ASKED, *words)
    assert (code, output) == (2, "")
    assert errors.startswith(f"cpuft: error: {said}"), errors
    assert errors.count("\n") == 1
    assert left(region) == NOTHING
    assert [*tmp_path.glob("state/*")] == []


def test_without_credentials(
    region: Region, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN"):
            patch.delenv(name, raising=False)
        code, _, errors = call_cpuft(capsys, *ASKED, "--region", REGION)
    assert code == 2
    assert errors.startswith("cpuft: error: there are no AWS credentials")
    assert errors.count("\n") == 1


def test_a_dry_run_prints_calls_and_makes_none(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = call_cpuft(capsys, *ASKED, "--region", REGION, "--dry-run")
    assert code == 0
    assert "aws ec2 create-security-group --region us-east-1 --cli-input-json" in output
    assert left(region) == NOTHING


def test_status_and_down_of_a_cluster_that_this_machine_has_no_record_of(
    region: Region, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_aws(region, tmp_path / "elsewhere", nodes=2).make(say, refuse)
    code, output, _ = call_cpuft(capsys, "provision", "status", "--region", REGION)
    assert (code, output.count(" running, i-")) == (0, 2)
    code, output, _ = call_cpuft(capsys, "provision", "status", "lab", "--region", REGION)
    assert (code, output.count(" running, i-")) == (0, 2)
    code, output, _ = call_cpuft(capsys, "provision", "down", "lab", "--region", REGION)
    assert code == 0
    assert output.startswith("cluster lab was removed; it has cost about ")
    assert left(region) == NOTHING


def test_the_policy_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = call_cpuft(capsys, "provision", "aws", "--policy")
    assert code == 0
    assert json.loads(output) == read_policy()


def read_policy() -> dict[str, Any]:
    return dict(json.loads(POLICY.read_text()))


def become(user: str, monkeypatch: pytest.MonkeyPatch, *without: str) -> None:
    """Use the credentials of a user who has the printed policy without some permissions. moto then refuses other calls.

    moto ignores resources and conditions, so this proves only that these actions suffice.
    """
    from moto import settings
    from moto.core.authorization import ActionAuthenticatorMixin

    statements = [
        one | {"Resource": "*", "Action": [*list_actions(one) - {*without}]} for one in read_policy()["Statement"]
    ]
    for one in statements:
        one.pop("Condition", None)
    allowed = {"Version": "2012-10-17", "Statement": [one for one in statements if one["Action"]]}
    iam = client("iam")
    iam.create_user(UserName=user)
    iam.put_user_policy(UserName=user, PolicyName="printed", PolicyDocument=json.dumps(allowed))
    key = iam.create_access_key(UserName=user)["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    monkeypatch.setattr(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    monkeypatch.setattr(ActionAuthenticatorMixin, "request_count", 0)


def test_the_price_is_printed_even_with_yes(region: Region, tmp_path: Path) -> None:
    told: list[str] = []
    lab = make_aws(region, tmp_path, nodes=2)
    lab.make(told.append, refuse)
    assert re.match(
        r"2 x m7i\.8xlarge on demand: each instance costs "
        r"about \$[0-9.]+ per hour \(list price of us-east-1 in 20[0-9]{2}\)\. "
        r"All together cost \$[0-9.]+ per hour, \$[0-9.]+ until the lease ends at ",
        told[0],
    ), told
    assert sum("All together" in line for line in told) == 1
    lab.down(say)


def test_the_printed_policy_suffices(region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        become("renter", patch)
        cloud = AwsClient(REGION, region.sleep)
        lab = make_aws(region, tmp_path, market="spot", nodes=2, open_client=lambda name: cloud)
        lab.make(say, refuse)
        lab.extend("5h", say)
        (instance, *_) = parse_instances(cloud.query("describe_instances"))
        assert find_host_key(cloud, instance.id) == ""
        lab.down(say)
        write_wheels(tmp_path / "wheels")
        services = region.services(open_client=lambda name: cloud)
        config = ImageConfig(recipe=str(RECIPE), wheels=str(tmp_path / "wheels"), region=REGION, yes=True)
        AmiBuilder(config, {"CPUFT_STATE": str(tmp_path / "state")}, services).make(say, refuse)
        delete_image(list_images(REGION, services).split()[0], REGION, False, say, services)
        assert "user/renter" in cloud.caller
    assert left(region) == NOTHING


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ((), "ec2:RunInstances"),
        ((), "ec2:DescribeInstances"),
        ((), "ec2:CreatePlacementGroup"),
        ((), "ec2:GetConsoleOutput"),
        (("--market", "spot"), "iam:GetRole"),
        (("--market", "spot"), "iam:CreateServiceLinkedRole"),
    ],
)
def test_a_missing_permission_is_named(
    words: tuple[str, ...],
    right: str,
    region: Region,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        become("poor", patch, right)
        code, _, errors = call_cpuft(capsys, *ASKED, "--region", REGION, *words)
    assert code == 2
    assert errors.splitlines()[-1] == (
        f"cpuft: error: your AWS credentials lack the permission {right}: add the policy that `cpuft provision aws "
        "--policy` prints to your IAM user or role"
    )
    assert live() == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give --output with a new directory to make a root filesystem, or --aws to make an AMI"),
        (("--delete", "cpuft-x"), "--recipe is for a new image: leave it out"),
        (
            ("--aws", "--type", "m7i.9xlarge"),
            "region us-east-1 has no instance type 'm7i.9xlarge': did you mean m7i.xlarge or m7i.8xlarge",
        ),
        (("--aws", "--zone", "us-east-1z"), "region us-east-1 has no zone 'us-east-1z' that offers m7i"),
        (("--aws", "--recipe", "none.yaml"), "recipe none.yaml cannot be used"),
        (("--aws", "--wheels", "none"), "--wheels /"),
        (
            ("--aws", "--no-yes"),
            "nothing was rented: answer yes at a terminal, or add --yes. The price: 1 x",
        ),
    ],
)
def test_bad_input_of_an_image_is_one_line(
    words: tuple[str, ...], said: str, region: Region, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_wheels(tmp_path / "wheels")
    asked = ("--region", REGION, "--ssh-from", "203.0.113.7", "--yes", "--wheels", "wheels", "--recipe", str(RECIPE))
    code, output, errors = call_cpuft(capsys, "provision", "image", *asked, *words)
    assert (code, output) == (2, "")
    assert errors.startswith(f"cpuft: error: {said}"), errors
    assert errors.count("\n") == 1
    assert left(region) == NOTHING


def test_an_ami_that_is_not_there_is_not_deleted(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = call_cpuft(capsys, "provision", "image", "--region", REGION, "--delete", "cpuft-x", "--yes")
    assert (code, output) == (2, "")
    assert errors == "cpuft: error: cpuft has made no AMI 'cpuft-x' in us-east-1: there is nothing to delete\n"


def test_amis_are_listed_and_deleted_on_the_command_line(
    region: Region, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_wheels(tmp_path / "wheels")
    config = ImageConfig(recipe=str(RECIPE), wheels=str(tmp_path / "wheels"), region=REGION, yes=True)
    AmiBuilder(config, {"CPUFT_STATE": str(tmp_path / "state")}, region.services()).make(say, refuse)
    code, output, _ = call_cpuft(capsys, "provision", "image", "--list", "--region", REGION)
    name = output.split()[0]
    assert (code, output.count("\n")) == (0, 1)
    code, output, _ = call_cpuft(capsys, "provision", "image", "--delete", name, "--region", REGION, "--dry-run")
    assert (code, output.count("aws ec2 deregister-image")) == (0, 1)
    code, output, _ = call_cpuft(capsys, "provision", "image", "--delete", name, "--region", REGION)
    assert (code, output) == (0, f"AMI {name} was deleted\n")
    code, output, _ = call_cpuft(capsys, "provision", "image", "--list", "--region", REGION)
    assert (code, output) == (0, "cpuft has made no AMI in us-east-1\n")


def test_status_continues_after_an_account_that_cannot_be_queried(
    region: Region, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_aws(region, tmp_path, nodes=1).make(say, refuse)
    mine = Entry("mine", "local", str(tmp_path / "hostfiles" / "mine"), options={"name": "mine", "nodes": "2"})
    write_text(tmp_path / "state" / "mine" / FILE_NAME, format_entry(mine))
    with monkeypatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN"):
            patch.delenv(name, raising=False)
        code, output, errors = call_cpuft(capsys, "provision", "status")
        assert (code, errors) == (0, "")
        first, second, *_ = output.splitlines()
        assert first.startswith("cluster lab cannot be queried: there are no AWS credentials")
        assert second.startswith("cluster mine (local)")
        assert call_cpuft(capsys, "provision", "status", "lab")[0] == 2
