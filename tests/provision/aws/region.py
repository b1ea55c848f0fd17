"""A simulated AWS region in this process: moto with missing features added; a hook counts calls and can kill."""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cpuft.provision.aws.client import AwsClient, is_read
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.aws.provider import Aws, Services

REGION = "us-east-1"
ACCOUNT = "123456789012"
NAME = "lab"


class KilledError(BaseException):
    """Stands for the death of the process that makes a cluster: only `except BaseException` would run after it."""


@dataclass
class Region:
    """What has happened in the region, and which faults will happen."""

    image: str = ""
    faults: list[str] = field(default_factory=list)
    """Error codes of the next calls of RunInstances. With `lost` the call takes effect, but its response is lost."""
    lasting: dict[str, str] = field(default_factory=dict)
    """Zone -> error code of every call of RunInstances in this zone."""
    spot_fault: str = ""
    """Error code of every request for spot instances, in all zones."""
    ending: str = ""
    """Why AWS ends new instances: they stay pending until somebody sleeps, and then terminate. Empty if they run."""
    ends_at_once: bool = False
    """Whether these instances terminate before the answer to RunInstances."""
    pending: list[Any] = field(default_factory=list)
    """Instances that will be ended."""
    tokens: dict[str, Any] = field(default_factory=dict)
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    addresses: list[str] = field(default_factory=list)
    """Addresses for the instances in their order, if they stand for real hosts."""
    read_console: Callable[[str], str] = lambda instance: ""
    """Returns what is on the console of an instance."""
    hidden: int = 0
    """How many more times DescribeInstances returns nothing."""
    start: float = field(default_factory=time.time)
    seconds: float = 0.0
    """Seconds that were slept. Only sleeping moves this region's clock, however slow the machine is."""
    calls: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    kill: tuple[int, str] = (-1, "")
    """Number of the changing call at which the process dies, and whether it dies before or after the call."""
    outright: bool = False
    """Whether the process dies as by SIGKILL, so that its cleanup does nothing either."""
    dead: bool = False
    lingers: bool = False
    """Whether an AMI becomes available only after somebody has slept."""
    coming: list[Any] = field(default_factory=list)
    """AMIs that are being made."""
    image_faults: list[str] = field(default_factory=list)
    """Error codes of the next calls of CreateImage, as in `faults`."""

    @property
    def mutating(self) -> list[str]:
        """Names of calls that changed something, or would have."""
        return [name for name, parameters in self.calls if is_mutating(name, parameters)]

    def hook(self, when: str, method: str, parameters: Mapping[str, Any]) -> None:
        number, word = self.kill
        if when == "before":
            self.calls.append((method, parameters))
        struck = is_mutating(method, parameters) and (len(self.mutating) - 1, when) == (number, word)
        self.dead = self.outright and (self.dead or struck)
        if struck or self.dead:
            raise KilledError

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        for one in self.coming:
            one.state = "available"
        self.coming.clear()
        for one in self.pending:
            one.terminate()
            one.state_reason.message = self.ending
        self.pending.clear()

    def now(self) -> float:
        return self.start + self.seconds

    def services(self, **changes: Any) -> Services:
        """The world of a launcher that rents and does not log in."""
        services = Services(lambda name: _open_cloud(), self.sleep, self.now, lambda: "203.0.113.7\n", uses_ssh=False)
        return replace(services, **changes)


def is_mutating(method: str, parameters: Mapping[str, Any]) -> bool:
    return not is_read(method) and not parameters.get("DryRun")


def make_aws(region: Region, folder: Path, **options: Any) -> Aws:
    """Return a provider that keeps its records in a folder of its own, like another machine."""
    services = region.services(**{name: options.pop(name) for name in [*options] if name in Services.__annotations__})
    config = replace(AwsConfig(name=NAME, nodes=4, region=REGION, yes=True), **options)
    return Aws(config, {"CPUFT_STATE": str(folder / "state")}, services=services)


def say(text: str) -> None:
    """Ignore progress messages."""


def refuse(question: str) -> bool:
    raise AssertionError(question)


_OPEN: list[Region] = []
"""Open regions; the last one is in use. Clients are slow to make, so all regions share them."""


def make(region: Region, folder: Path, **options: object) -> str:
    return make_aws(region, folder, **options).make(say, refuse)


def down(region: Region, folder: Path) -> None:
    make_aws(region, folder).down(say)


def watch(cloud: AwsClient, hook: Callable[[str, str, Mapping[str, Any]], None]) -> None:
    """Call `hook` with "before" or "after", the method and its parameters, before every call and after its success."""
    from botocore import xform_name

    def before(params: Mapping[str, Any], model: Any, context: dict[str, Any], **rest: Any) -> None:
        context["parameters"] = {**params}
        hook("before", xform_name(model.name), context["parameters"])

    def after(http_response: Any, model: Any, context: dict[str, Any], **rest: Any) -> None:
        if http_response.status_code < 300:
            hook("after", xform_name(model.name), context["parameters"])

    cloud.session.events.register("provide-client-params", before)
    cloud.session.events.register("after-call", after)


@functools.cache
def _open_cloud() -> AwsClient:
    cloud = AwsClient(REGION, lambda seconds: _OPEN[-1].sleep(seconds))
    watch(cloud, lambda *told: _OPEN[-1].hook(*told))
    return cloud


@functools.cache
def client(service: str = "ec2") -> Any:
    import boto3

    return boto3.client(service, REGION)


def live() -> list[dict[str, Any]]:
    """Return instances that cost money, whatever their tags are."""
    filters = [{"Name": "instance-state-name", "Values": ["pending", "running", "stopping", "stopped"]}]
    return [one for place in client().describe_instances(Filters=filters)["Reservations"] for one in place["Instances"]]


def left(region: Region) -> dict[str, Any]:
    """Return all resources that did not exist when the region was opened."""
    ec2 = client()
    return {
        "instances": [one["InstanceId"] for one in live()],
        "groups": [one["GroupName"] for one in ec2.describe_security_groups()["SecurityGroups"] if "cpuft" in str(one)],
        "places": [*region.places],
        "volumes": [one["VolumeId"] for one in ec2.describe_volumes()["Volumes"]],
    }


NOTHING: dict[str, list[str]] = {"instances": [], "groups": [], "places": [], "volumes": []}


@contextlib.contextmanager
def open_region() -> Iterator[Region]:
    """Open a region that has one AMI and nothing else, with credentials for it."""
    from moto import mock_aws

    region = Region()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_CONFIG_FILE", "/nonexistent")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        patch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
        with mock_aws():
            patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
            _OPEN.append(region)
            _complete(region, patch)
            region.image = client().register_image(
                Name="debian-12-amd64",
                RootDeviceName="/dev/xvda",
                Architecture="x86_64",
                VirtualizationType="hvm",
                BlockDeviceMappings=[{"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 8}}],
            )["ImageId"]
            yield region


def _complete(region: Region, patch: pytest.MonkeyPatch) -> None:
    """Add what moto lacks: ClientToken, capacity errors, placement groups, Debian's AMI, tagged snapshots of AMIs."""
    from moto.ec2.models.amis import AmiBackend
    from moto.ec2.models.instances import InstanceBackend
    from moto.ec2.responses import EC2Response
    from moto.iam.models import SERVICE_NAME_CONVERSION
    from moto.ssm.models import ParameterDict

    patch.setattr(InstanceBackend, "run_instances", _make_run(region, InstanceBackend.run_instances))
    patch.setattr(EC2Response, "describe_instances", _make_describe(region, EC2Response.describe_instances))
    patch.setattr(EC2Response, "get_console_output", _make_console(region))
    patch.setattr(AmiBackend, "create_image", _make_imaging(region, AmiBackend.create_image))
    patch.setattr(EC2Response, "deregister_image", _make_deregistration(EC2Response.deregister_image))
    patch.setitem(SERVICE_NAME_CONVERSION, "spot", "EC2Spot")
    for name, method in _make_places(region).items():
        patch.setattr(EC2Response, name, method, raising=False)
    patch.setattr(ParameterDict, "__contains__", lambda own, key: True)
    patch.setattr(ParameterDict, "__getitem__", lambda own, key: [_make_parameter(key, region)])


def _make_imaging(region: Region, real: Any) -> Any:
    from moto.ec2.exceptions import EC2ClientError

    def create(self: Any, instance_id: str, name: str, description: str, tag_specifications: list[Any]) -> Any:
        if any(one.name == name for one in self.amis.values()):
            raise EC2ClientError("InvalidAMIName.Duplicate", f"AMI name {name} is already in use")
        tags = {one["ResourceType"]: one["Tags"] for one in tag_specifications}
        made = real(self, instance_id, name, description, [{"ResourceType": "image", "Tags": tags["image"]}])
        for tag in tags["snapshot"]:
            made.ebs_snapshot.add_tag(tag["Key"], tag["Value"])
        if region.lingers:
            made.state = "pending"
            region.coming.append(made)
        if region.image_faults:
            raise EC2ClientError(region.image_faults.pop(0), "Nobody knows")
        return made

    return create


def _make_deregistration(real: Any) -> Any:
    def deregister(self: Any) -> Any:
        made = self.ec2_backend.amis.get(self._get_param("ImageId"))
        answer = real(self)
        if self._get_param("DeleteAssociatedSnapshots"):
            self.ec2_backend.delete_snapshot(made.ebs_snapshot.id)
        return answer

    return deregister


def _make_parameter(key: str, region: Region) -> Any:
    from moto.ssm.models import Parameter

    return Parameter(ACCOUNT, key, region.image, "String", None, None, None, time.time(), 1, "aws:ec2:image")


def _make_run(region: Region, real: Any) -> Any:
    from moto.ec2.exceptions import EC2ClientError

    def run(self: Any, image_id: str, count: int, *words: Any, **options: Any) -> Any:
        zone = self.get_subnet(options["nics"][0]["SubnetId"]).availability_zone
        token, said = options["client_token"], (image_id, count, options["instance_type"], zone)
        spot = region.spot_fault if options["instance_market_options"] else ""
        code = region.faults.pop(0) if region.faults else region.lasting.get(zone, spot)
        if token in region.tokens:
            before, answer = region.tokens[token]
            if before != said:
                raise EC2ClientError("IdempotentParameterMismatch", "Arguments on this request are inconsistent.")
            return answer
        if not code or code == "lost":
            region.tokens[token] = said, real(self, image_id, count, *words, **options)
            for one, address in zip(region.tokens[token][1].instances, region.addresses):
                one.nics[0].private_ip_address = one.nics[0].public_ip = address
            for one in region.tokens[token][1].instances if region.ending else ():
                one._state.name, one._state.code = "pending", 0
                region.pending.append(one)
            if region.ends_at_once:
                region.sleep(0)
        if code:
            raise EC2ClientError("InternalError" if code == "lost" else code, f"We have none in {zone}")
        return region.tokens[token][1]

    return run


def _make_describe(region: Region, real: Any) -> Any:
    from moto.core.responses import ActionResult

    def describe(self: Any) -> Any:
        region.hidden -= 1
        return real(self) if region.hidden < 0 else ActionResult({"Reservations": []})

    return describe


def format_console(keys: str) -> str:
    """Return what cloud-init writes to the console of an instance with these public host keys."""
    return f"-----BEGIN SSH HOST KEY KEYS-----\r\n{keys}\r\n-----END SSH HOST KEY KEYS-----\r\n"


def _make_console(region: Region) -> Any:
    from moto.core.responses import ActionResult

    def show(self: Any) -> Any:
        self.error_on_dryrun()
        text = region.read_console(self._get_param("InstanceId"))
        return ActionResult({"Output": base64.b64encode(text.encode()).decode()})

    return show


def _make_places(region: Region) -> dict[str, Any]:
    from moto.core.responses import ActionResult
    from moto.ec2.exceptions import EC2ClientError

    def create(self: Any) -> Any:
        self.error_on_dryrun()
        name = self._get_param("GroupName")
        if name in region.places:
            raise EC2ClientError("InvalidPlacementGroup.Duplicate", f"The placement group {name} already exists.")
        tags = [tag for one in self._get_param("TagSpecifications", []) for tag in one["Tags"]]
        region.places[name] = {"GroupName": name, "State": "available", "Strategy": "cluster", "Tags": tags}
        return ActionResult({"PlacementGroup": region.places[name]})

    def describe(self: Any) -> Any:
        (wanted,) = self._get_param("Filters")
        values = [(wanted["Name"].removeprefix("tag:"), value) for value in wanted["Values"]]
        found = [one for one in region.places.values() if {(t["Key"], t["Value"]) for t in one["Tags"]} & {*values}]
        return ActionResult({"PlacementGroups": found})

    def delete(self: Any) -> Any:
        del region.places[self._get_param("GroupName")]
        return ActionResult({})

    methods = {"create": create, "delete": delete}
    return {f"{verb}_placement_group": method for verb, method in methods.items()} | {
        "describe_placement_groups": describe
    }
