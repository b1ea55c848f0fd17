"""Calls to AWS as steps of a plan, which print as commands of `aws`, and the client that makes them with boto3."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError, describe_error, requires, suggest_names
from cpuft.plans import Step


class Tag:
    """Keys of the tags of resources in AWS. The values of times are in seconds since the epoch."""

    CLUSTER = "cpuft:cluster"
    """Of every resource of a cluster, by which it is found: the cluster's name."""
    OWNER = "cpuft:owner"
    """ARN of the user or role that made the resource."""
    UNTIL, LIMIT = "cpuft:until", "cpuft:limit"
    """The end of the lease, and the time to which a running job may extend it."""
    GENERATION = "cpuft:generation"
    """When missing instances were last requested."""
    GROUP = "cpuft:group"
    """The security group in which an instance was started."""
    IMAGE, ENVIRONMENT = "cpuft:image", "cpuft:environment"
    """Of AMIs and their snapshots, which outlive clusters: digest of the recipe, stamp of the environment."""


SPOT_SERVICE, SPOT_ROLE = "spot.amazonaws.com", "AWSServiceRoleForEC2Spot"
"""The role without which AWS starts no spot instances."""
POLICY = Path(__file__).with_name("policy.json")
"""The IAM policy with the least permissions that renting needs."""
_SERVICES = {
    "get_caller_identity": "sts",
    "get_role": "iam",
    "create_service_linked_role": "iam",
    "get_parameter": "ssm",
}
"""All other calls are to EC2."""


def is_read(method: str) -> bool:
    """Whether a call changes nothing: if the name of boto3's method begins with describe_ or get_."""
    return method.startswith(("describe_", "get_"))


@dataclass(frozen=True)
class CallStep(Step):
    """A step that is a call to AWS. Its command is the equivalent command of AWS's command line."""

    method: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """As boto3 takes them."""


def plan_call(method: str, why: str, region: str, parameters: Mapping[str, Any]) -> CallStep:
    """Return the step that makes a call by its name in boto3 ("run_instances"), with the same as an `aws` command.

    `region` is in the command only: the client that executes the step has its own. No parameter is a secret.
    """
    command = ["aws", _SERVICES.get(method, "ec2"), method.replace("_", "-"), "--region", region]
    command += ["--cli-input-json", json.dumps(parameters)]
    return CallStep(why, tuple(command), method=method, parameters=parameters)


def make_tags(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Return tags in the form that calls take: [{"Key": key, "Value": value}, ...]."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def specify_tags(tags: Mapping[str, str], *resource_types: str) -> list[dict[str, Any]]:
    """Return the TagSpecifications of a call: one for each resource type, such as "instance", with the same tags."""
    return [{"ResourceType": kind, "Tags": make_tags(tags)} for kind in resource_types]


def read_tags(resource: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a resource that a call described, by key; {} without tags."""
    return {tag["Key"]: tag["Value"] for tag in resource.get("Tags", ())}


_ATTEMPTS = 6
"""Of a call that changes nothing."""
_REPEAT_SECONDS = 180.0
"""How long a call that changes something is repeated; a security group is in use until its last interface is gone."""
CAPACITY_CODES = (
    "InsufficientInstanceCapacity",
    "InsufficientHostCapacity",
    "InsufficientFreeAddressesInSubnet",
    "InsufficientAddressCapacity",
    "SpotMaxPriceTooLow",
    "Unsupported",
)
"""Error codes that say that a zone has no capacity. Only these lead to an attempt in another zone."""
_ALREADY_DONE = {
    "create": (".Duplicate", "EntityAlreadyExists", "InvalidInput"),
    "authorize": ("InvalidPermission.Duplicate",),
    "revoke": ("InvalidPermission.NotFound",),
    "terminate": (".NotFound",),
    "delete": (".NotFound", ".Unknown"),
    "deregister": (".NotFound", ".Unavailable"),
}
"""Ends of codes that say that a call took effect before; InvalidInput is IAM's for a role that exists already."""
_TRANSIENT_CODES = (
    "InternalError ServiceUnavailable Unavailable RequestLimitExceeded Throttling ThrottlingException "
    "InvalidGroup.NotFound InvalidPlacementGroup.Unknown DependencyViolation InvalidPlacementGroup.InUse "
    "InvalidSnapshot.InUse"
)
"""Codes beside HTTP 5xx after which a call is repeated: AWS is busy, or a resource is not visible yet or in use."""
_QUOTA_CODES = ("VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded")
_FORBIDDEN_CODES = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException")
_CREDENTIAL_CODES = (
    "AuthFailure InvalidClientTokenId UnrecognizedClientException SignatureDoesNotMatch ExpiredToken "
    "ExpiredTokenException RequestExpired OptInRequired"
)
_GIVE_CREDENTIALS = (
    "put an access key and its secret into ~/.aws/credentials or the environment, or log in with the AWS command line"
)


class CallError(CpuftError):
    """A call to AWS did not succeed. `code` and `message` are those of AWS.

    `permission` is what the call needs, as an IAM policy names it, and `status` that of HTTP; 0 for no answer.
    """

    def __init__(self, permission: str, code: str, message: str, status: int = 400) -> None:
        message = message.strip().rstrip(".")
        is_fault = not status or status >= 500 or code in _TRANSIENT_CODES.split()
        self.code, self.message, self.is_transient = code, message, is_fault and code not in CAPACITY_CODES
        if code in _FORBIDDEN_CODES:
            text = (
                f"your AWS credentials lack the permission {permission}: add the policy that `cpuft provision aws "
                "--policy` prints to your IAM user or role"
            )
        elif code in _CREDENTIAL_CODES.split():
            text = f"AWS does not accept your credentials ({code}): {_GIVE_CREDENTIALS}"
        elif code in _QUOTA_CODES:
            text = (
                f"your quota does not allow this beside what runs already ({code}: {message}): rent fewer or smaller "
                "instances, terminate others, or request a higher quota in the Service Quotas console"
            )
        elif not status:
            text = f"AWS does not answer ({permission}: {message}): check --region and the network of this machine"
        elif self.is_transient:
            text = f"AWS cannot do {permission} now ({code}: {message}): run the command again later"
        else:
            text = f"AWS refused {permission} ({code}: {message}): correct the cause, then run the command again"
        super().__init__(text)


class AwsClient:
    """One AWS account in one region; "" is the region of the user's AWS configuration.

    The constructor raises CpuftError when boto3, the region or the profile is missing or unknown. All methods raise
    CallError when a call does not succeed, and CpuftError when credentials are missing or parameters are not valid.
    """

    def __init__(self, region: str, sleep: Callable[[float], None] = time.sleep) -> None:
        with requires("aws", "renting from AWS needs boto3"):
            import boto3
            import botocore.exceptions
        try:
            self.session = boto3.session.Session(region_name=region or None)
        except botocore.exceptions.ProfileNotFound as error:
            raise CpuftError(f"{error}: set AWS_PROFILE to a profile of ~/.aws/config") from None
        self.region = str(self.session.region_name or "")
        known = self.session.get_available_regions("ec2")
        if not self.region:
            raise CpuftError("no AWS region is given: add --region, such as --region us-east-1")
        if self.region not in known:
            raise CpuftError(f"AWS has no region {self.region!r:.60}: {suggest_names(self.region, known)}")
        self._clients: dict[tuple[str, int], Any] = {}
        self._sleep = sleep

    def _get_client(self, method: str) -> Any:
        """Return boto3's client for a method. It repeats only calls that read: botocore would repeat RunInstances, too,
        when a zone has no capacity, because that error comes as HTTP 500.
        """
        from botocore.config import Config

        key = _SERVICES.get(method, "ec2"), _ATTEMPTS if is_read(method) else 1
        if key not in self._clients:
            retries: Any = {"total_max_attempts": key[1], "mode": "standard"}
            config = Config(connect_timeout=10, read_timeout=60, retries=retries)
            self._clients[key] = self.session.client(key[0], config=config)
        return self._clients[key]

    def _request(self, method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        import botocore.exceptions as faults

        client = self._get_client(method)
        permission = f"{client.meta.service_model.signing_name}:{client.meta.method_to_api_mapping[method]}"
        try:
            if client.can_paginate(method) and "MaxResults" not in parameters:
                return dict(client.get_paginator(method).paginate(**parameters).build_full_result())
            return dict(getattr(client, method)(**parameters))
        except faults.ClientError as error:
            reason, status = error.response["Error"], error.response["ResponseMetadata"]["HTTPStatusCode"]
            raise CallError(permission, str(reason.get("Code")), str(reason.get("Message")), status) from None
        except (faults.NoCredentialsError, faults.PartialCredentialsError, faults.CredentialRetrievalError) as error:
            raise CpuftError(f"there are no AWS credentials ({error}): {_GIVE_CREDENTIALS}") from None
        except faults.ParamValidationError as error:
            raise CpuftError(f"AWS does not accept a value ({describe_error(error)}): correct the options") from None
        except faults.BotoCoreError as error:
            raise CallError(permission, "", str(error), 0) from None

    @functools.cached_property
    def caller(self) -> str:
        """ARN of the user or role that makes the calls."""
        return str(self.query("get_caller_identity")["Arn"])

    def query(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Make a call that `is_read`, else AssertionError; return all pages as one, or with MaxResults the first."""
        assert is_read(method), method
        return self._request(method, parameters)

    def find(self, method: str, missing: str, **parameters: Any) -> dict[str, Any]:
        """Make a call as `query`, but return {} if AWS refuses it with a code that begins with `missing`."""
        try:
            return self.query(method, **parameters)
        except CallError as error:
            if not error.code.startswith(missing):
                raise
        return {}

    def dry_run(self, call: CallStep) -> None:
        """Check that AWS would allow a call, without making it; CallError if not.

        Calls to services other than EC2 pass unchecked, and so do a call that has taken effect before and one about an
        instance that does not exist.
        """
        if call.method in _SERVICES:
            return
        try:
            self._request(call.method, {**call.parameters, "DryRun": True})
        except CallError as error:
            is_allowed = error.code == "DryRunOperation" or error.code.startswith("InvalidInstanceID")
            if not is_allowed and not _is_done(call.method, error.code):
                raise

    def execute(self, call: CallStep) -> dict[str, Any]:
        """Make a call that changes something, and return its response; {} for a call that has taken effect before.

        A call whose outcome is unknown, or that cannot be made yet, is repeated for 3 minutes. CallError: it fails.
        """
        waited, pause = 0.0, 1.0
        while True:
            try:
                return self._request(call.method, call.parameters)
            except CallError as error:
                if _is_done(call.method, error.code):
                    return {}
                if not error.is_transient or waited >= _REPEAT_SECONDS:
                    raise
            pause = min(2 * pause, 15.0)
            self._sleep(pause)
            waited += pause


def _is_done(method: str, code: str) -> bool:
    return code.endswith(_ALREADY_DONE.get(method.partition("_")[0], ()))
