"""The edge to AWS: makes calls, and says what became of them. The only module for clusters that imports boto3."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError, install_command, near_names
from cpuft.plan import Step

TAG = "cpuft:cluster"
"""Tag of everything that belongs to a cluster; its value is the cluster's name. Everything else is found by it."""
OWNER, UNTIL, GENERATION = "cpuft:owner", "cpuft:until", "cpuft:generation"
"""Who made it; when its lease ends; when its missing instances were last asked for. Times are seconds of the epoch."""
LIMIT, GROUP = "cpuft:limit", "cpuft:group"
"""Until when a running job may move the end of the lease; of an instance, which group it was started in."""
IMAGE, ENVIRONMENT = "cpuft:image", "cpuft:environment"
"""Of images and their snapshots, which outlive clusters: the recipe's digest, the environment's stamp."""
LOOK, MAKE, CHANGE, ROLE = "look", "make", "change", "role"
"""What a call does: nothing; make something with our tag; change or end something that has the tag; make the role
without which AWS starts no spot instances."""
SPOT_SERVICE, SPOT_ROLE = "spot.amazonaws.com", "AWSServiceRoleForEC2Spot"


@dataclass(frozen=True)
class Action:
    """One call that this room may make."""

    service: str
    """As boto3 and AWS's command line call it."""
    right: str
    """As a policy calls it."""
    kind: str
    made: tuple[str, ...] = ()
    """Kinds of resources that it makes, or changes."""
    used: tuple[str, ...] = ()
    """Kinds of resources that it needs, and that are not the cluster's."""
    ours: tuple[str, ...] = ()
    """Kinds of resources that it needs, and that must be the cluster's."""


def tag_of(kind: str) -> str:
    """The tag that all resources of a kind carry that are ours."""
    return IMAGE if kind in ("image", "snapshot") else TAG


def _look(right: str, service: str = "ec2", prefix: str = "") -> Action:
    return Action(service, f"{prefix or service}:{right}", LOOK)


def _change(right: str, *made: str) -> Action:
    return Action("ec2", f"ec2:{right}", CHANGE, made)


ACTIONS: dict[str, Action] = {
    "get_caller_identity": _look("GetCallerIdentity", "sts"),
    "get_role": _look("GetRole", "iam"),
    "get_parameter": _look("GetParameter", "ssm"),
    "get_service_quota": _look("GetServiceQuota", "service-quotas", "servicequotas"),
    "describe_images": _look("DescribeImages"),
    "describe_instance_type_offerings": _look("DescribeInstanceTypeOfferings"),
    "describe_instance_types": _look("DescribeInstanceTypes"),
    "describe_instances": _look("DescribeInstances"),
    "describe_key_pairs": _look("DescribeKeyPairs"),
    "describe_placement_groups": _look("DescribePlacementGroups"),
    "describe_security_groups": _look("DescribeSecurityGroups"),
    "describe_snapshots": _look("DescribeSnapshots"),
    "describe_spot_price_history": _look("DescribeSpotPriceHistory"),
    "describe_subnets": _look("DescribeSubnets"),
    "describe_volumes": _look("DescribeVolumes"),
    "create_security_group": Action("ec2", "ec2:CreateSecurityGroup", MAKE, ("security-group",), ("vpc",)),
    "create_placement_group": Action("ec2", "ec2:CreatePlacementGroup", MAKE, ("placement-group",)),
    "import_key_pair": Action("ec2", "ec2:ImportKeyPair", MAKE, ("key-pair",)),
    "run_instances": Action(
        "ec2",
        "ec2:RunInstances",
        MAKE,
        ("instance", "volume", "network-interface", "spot-instances-request"),
        ("image", "subnet", "security-group", "key-pair", "placement-group"),
    ),
    "create_image": Action("ec2", "ec2:CreateImage", MAKE, ("image", "snapshot"), ours=("instance",)),
    "create_service_linked_role": Action("iam", "iam:CreateServiceLinkedRole", ROLE),
    "create_tags": _change("CreateTags", "security-group", "instance"),
    "authorize_security_group_ingress": _change("AuthorizeSecurityGroupIngress", "security-group"),
    "authorize_security_group_egress": _change("AuthorizeSecurityGroupEgress", "security-group"),
    "revoke_security_group_ingress": _change("RevokeSecurityGroupIngress", "security-group"),
    "revoke_security_group_egress": _change("RevokeSecurityGroupEgress", "security-group"),
    "terminate_instances": _change("TerminateInstances", "instance"),
    "delete_security_group": _change("DeleteSecurityGroup", "security-group"),
    "delete_placement_group": _change("DeletePlacementGroup", "placement-group"),
    "delete_key_pair": _change("DeleteKeyPair", "key-pair"),
    "delete_volume": _change("DeleteVolume", "volume"),
    "deregister_image": _change("DeregisterImage", "image"),
    "delete_snapshot": _change("DeleteSnapshot", "snapshot"),
}
"""All calls of this room, by boto3's names for them: no other can be made, and the printed policy is made of these."""


@dataclass(frozen=True)
class Call:
    """A call, its parameters as AWS has them."""

    method: str
    """One of ACTIONS."""
    parameters: dict[str, Any]
    files: dict[str, str]
    """Parameters that are files' contents: name -> path."""


def plan_call(
    method: str, why: str, region: str, parameters: Mapping[str, Any], files: Mapping[str, str] | None = None
) -> Step:
    """A call as a step: the words of AWS's command line that do the same. What is secret comes from a file."""
    words = ["aws", ACTIONS[method].service, method.replace("_", "-"), "--region", region]
    words += ["--cli-input-json", json.dumps(parameters)]
    for name, path in (files or {}).items():
        words += [f"--{_dashed(name)}", f"fileb://{path}"]
    return Step(why, tuple(words))


def parse_call(step: Step) -> Call | None:
    """The call that `plan_call` wrote; None for a step that is none."""
    if step.command[0] != "aws":
        return None
    _, _, verb, _, _, _, text, *rest = step.command
    files = {
        "".join(part.title() for part in flag[2:].split("-")): path.removeprefix("fileb://")
        for flag, path in zip(rest[::2], rest[1::2])
    }
    return Call(verb.replace("-", "_"), json.loads(text), files)


def _dashed(name: str) -> str:
    """`UserData` -> `user-data`."""
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("-")


def make_tags(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Tags as calls have them."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tag_all(tags: Mapping[str, str], *kinds: str) -> list[dict[str, Any]]:
    """TagSpecifications that give all resources a call makes these tags, from their first moment."""
    return [{"ResourceType": kind, "Tags": make_tags(tags)} for kind in kinds]


def read_tags(found: Mapping[str, Any]) -> dict[str, str]:
    """Tags of what a call described."""
    return {tag["Key"]: tag["Value"] for tag in found.get("Tags", ())}


Hook = Callable[[str, str, dict[str, Any]], None]
"""Told of every request: "before" or "after" it, boto3's name of the operation, its parameters."""
_ATTEMPTS = 6
"""Of a call whose outcome is unknown: the same again, which changes nothing where it took effect."""
_DELETE_SECONDS = 180.0
"""A group is in use until its last instance's interface is gone."""
CAPACITY = (
    "InsufficientInstanceCapacity",
    "InsufficientHostCapacity",
    "InsufficientFreeAddressesInSubnet",
    "InsufficientAddressCapacity",
    "SpotMaxPriceTooLow",
    "Unsupported",
)
"""One zone's refusals: only these lead to another zone. The first one comes as HTTP 500."""
_DONE = {
    "create_security_group": ("InvalidGroup.Duplicate",),
    "create_placement_group": ("InvalidPlacementGroup.Duplicate",),
    "import_key_pair": ("InvalidKeyPair.Duplicate",),
    "authorize_security_group_ingress": ("InvalidPermission.Duplicate",),
    "authorize_security_group_egress": ("InvalidPermission.Duplicate",),
    "revoke_security_group_ingress": ("InvalidPermission.NotFound",),
    "revoke_security_group_egress": ("InvalidPermission.NotFound",),
    "terminate_instances": ("InvalidInstanceID.NotFound",),
    "delete_security_group": ("InvalidGroup.NotFound",),
    "delete_placement_group": ("InvalidPlacementGroup.Unknown",),
    "delete_key_pair": ("InvalidKeyPair.NotFound",),
    "delete_volume": ("InvalidVolume.NotFound",),
    "create_image": ("InvalidAMIName.Duplicate",),
    "create_service_linked_role": ("InvalidInput", "EntityAlreadyExists"),
    "deregister_image": ("InvalidAMIID.NotFound", "InvalidAMIID.Unavailable"),
    "delete_snapshot": ("InvalidSnapshot.NotFound",),
}
"""What says that a call has been made before: an answer was lost."""
_TRANSIENT = (
    "InternalError",
    "ServiceUnavailable",
    "Unavailable",
    "RequestLimitExceeded",
    "Throttling",
    "ThrottlingException",
    "InvalidGroup.NotFound",
    "InvalidKeyPair.NotFound",
    "InvalidPlacementGroup.Unknown",
)
"""A fault or too many calls; and what was made a moment ago, and is not known everywhere yet. So is all of HTTP 5xx."""
_IN_USE = ("DependencyViolation", "InvalidPlacementGroup.InUse", "InvalidSnapshot.InUse")
"""What uses it is about to go."""
_FORBIDDEN = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException")
_STRANGERS = (
    "AuthFailure",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "ExpiredTokenException",
    "RequestExpired",
    "OptInRequired",
)
_WHO = "put a key and its secret into ~/.aws/credentials or the environment, or log in with your AWS tool"


class Refusal(CpuftError):
    """AWS said no; `code` is its word for why."""

    def __init__(self, method: str, code: str, said: str, status: int = 400) -> None:
        right = ACTIONS[method].right
        if code in _FORBIDDEN:
            text = f"your AWS credentials may not do {right}: add what cpuft provision aws --policy prints to them"
        elif code in _STRANGERS:
            text = f"AWS does not take your credentials ({code}): {_WHO}"
        else:
            text = f"AWS refused {right} ({code}: {said.strip().rstrip('.')}): correct that, and run it again"
        super().__init__(text)
        self.code, self.said = code, said
        self.transient = status >= 500 or code in _TRANSIENT


class Cloud:
    """One account in one region.

    Raises CpuftError: boto3 is missing, or no region is named; what a call raises is told with it.
    """

    def __init__(self, region: str, hook: Hook | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
        try:
            import boto3
            import botocore.exceptions
        except ImportError:
            raise CpuftError(f"renting from AWS needs boto3: {install_command('aws')}") from None
        try:
            self._session = boto3.session.Session(region_name=region or None)
        except botocore.exceptions.ProfileNotFound as error:
            raise CpuftError(f"{error}: set AWS_PROFILE to one of ~/.aws/config") from None
        self.region = str(self._session.region_name or "")
        known = self._session.get_available_regions("ec2")
        if not self.region:
            raise CpuftError("no region of AWS is named: say e.g. --region us-east-1")
        if self.region not in known:
            raise CpuftError(f"AWS has no region {self.region!r:.60}: {near_names(self.region, known)}")
        self._clients: dict[tuple[str, bool], Any] = {}
        self._hook, self._sleep = hook, sleep

    def _client(self, method: str) -> Any:
        """What changes something is tried once by botocore: whether to try again is decided here."""
        from botocore.config import Config

        service, again = ACTIONS[method].service, ACTIONS[method].kind == LOOK
        if (service, again) not in self._clients:
            retries: Any = {"total_max_attempts": _ATTEMPTS if again else 1, "mode": "standard"}
            config = Config(connect_timeout=10, read_timeout=60, retries=retries)
            self._clients[service, again] = self._session.client(service, config=config)
        return self._clients[service, again]

    def _request(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """Raises CpuftError: Refusal, or no credentials, or no answer (TimeoutError)."""
        import botocore.exceptions as faults

        client = self._client(method)
        self._tell("before", method, parameters)
        try:
            if client.can_paginate(method) and "MaxResults" not in parameters:
                answer = dict(client.get_paginator(method).paginate(**parameters).build_full_result())
            else:
                answer = dict(getattr(client, method)(**parameters))
        except faults.ClientError as error:
            told, status = error.response["Error"], error.response["ResponseMetadata"]["HTTPStatusCode"]
            raise Refusal(method, str(told.get("Code", "")), str(told.get("Message", "")), status) from None
        except (faults.NoCredentialsError, faults.PartialCredentialsError, faults.CredentialRetrievalError) as error:
            raise CpuftError(f"there are no AWS credentials ({error}): {_WHO}") from None
        except faults.ParamValidationError as error:
            raise CpuftError(f"AWS cannot be asked for that ({' '.join(str(error).split())}): correct it") from None
        except faults.BotoCoreError as error:
            raise TimeoutError(f"{ACTIONS[method].right}: {error}") from None
        self._tell("after", method, parameters)
        return answer

    def _tell(self, when: str, method: str, parameters: dict[str, Any]) -> None:
        if self._hook:
            self._hook(when, method, parameters)

    @functools.cached_property
    def caller(self) -> str:
        """Who calls, as AWS names them. Raises CpuftError."""
        return str(self.ask("get_caller_identity")["Arn"])

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What AWS says; all pages of it. Changes nothing. Raises CpuftError."""
        assert ACTIONS[method].kind == LOOK, method
        try:
            return self._request(method, parameters)
        except TimeoutError as error:
            raise CpuftError(f"AWS does not answer ({error}): check --region and this machine's network") from None

    def try_out(self, method: str, parameters: dict[str, Any]) -> None:
        """Ask whether a call would be allowed, without making it. Raises CpuftError when it would not."""
        try:
            self._request(method, parameters | {"DryRun": True})
        except Refusal as refusal:
            if refusal.code not in ("DryRunOperation", *_DONE.get(method, ())):
                raise
        except TimeoutError as error:
            raise CpuftError(f"AWS does not answer ({error}): check --region and this machine's network") from None

    def do(self, call: Call) -> str:
        """Make a call that changes something; the same again as long as nobody knows what became of it.

        Returns
        -------
        Why one zone has no instances for us; empty when the call was made.

        Raises CpuftError: AWS refused it, or the outcome stays unknown.
        """
        parameters = call.parameters | {name: Path(path).read_bytes() for name, path in call.files.items()}
        if "UserData" in parameters:
            parameters["UserData"] = parameters["UserData"].decode()
        trouble, waited, number = "", 0.0, 0
        while number < _ATTEMPTS:
            try:
                self._request(call.method, parameters)
                return ""
            except Refusal as refusal:
                if refusal.code in _DONE.get(call.method, ()):
                    return ""
                if call.method == "run_instances" and refusal.code in CAPACITY:
                    return f"{refusal.code}: {refusal.said}"
                number = self._count(refusal, number, waited)
                trouble = str(refusal)
            except TimeoutError as error:
                trouble, number = f"AWS does not answer ({error})", number + 1
            self._sleep(pause := min(2.0**number, 15.0))
            waited += pause
        raise CpuftError(f"{trouble}: run the same command again, it goes on where this one stopped")

    def _count(self, refusal: Refusal, number: int, waited: float) -> int:
        """The number of the next attempt. Raises the refusal when another would not help."""
        if refusal.code in _IN_USE and waited < _DELETE_SECONDS:
            return number
        if refusal.transient:
            return number + 1
        raise refusal
