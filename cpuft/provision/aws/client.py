"""Calls to AWS: the table of all calls that cpuft makes, calls as steps of a plan, and the client that makes them.

Each call prints as a command of AWS's own command line, `aws`, that does the same. Only this module imports boto3.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cpuft.errors import CpuftError, install_command, suggest_names
from cpuft.plan import Step

TAG = "cpuft:cluster"
"""Tag of every resource that belongs to a cluster; its value is the cluster's name. Resources are found by this tag."""
OWNER, UNTIL, GENERATION = "cpuft:owner", "cpuft:until", "cpuft:generation"
"""Tags of a cluster: who made it (an ARN), when its lease ends, and when its missing instances were last requested.
Times are in seconds since the epoch."""
LIMIT, GROUP = "cpuft:limit", "cpuft:group"
"""Tags: the time to which a running job may extend the lease; the security group in which an instance was started."""
IMAGE, ENVIRONMENT = "cpuft:image", "cpuft:environment"
"""Tags of AMIs and their snapshots, which outlive clusters: the digest of the recipe, the stamp of the environment."""

READ, CREATE, CHANGE, ROLE = "read", "create", "change", "role"
"""What a call does: change nothing; create a resource with our tag; change or delete a resource that has our tag;
create the role without which AWS starts no spot instances."""
SPOT_SERVICE, SPOT_ROLE = "spot.amazonaws.com", "AWSServiceRoleForEC2Spot"
"""Service and name of the role without which AWS starts no spot instances."""


@dataclass(frozen=True)
class Action:
    """A call that cpuft may make, and what an IAM policy has to know about it."""

    service: str
    """Service, as boto3 and the command line of AWS name it."""
    permission: str
    """Permission, as an IAM policy names it."""
    kind: str
    """`READ`, `CREATE`, `CHANGE` or `ROLE`."""
    targets: tuple[str, ...] = ()
    """Types of the resources that the call creates or changes."""
    uses: tuple[str, ...] = ()
    """Types of the resources that the call needs and that do not have to carry our tag."""
    uses_tagged: tuple[str, ...] = ()
    """Types of the resources that the call needs and that have to carry our tag."""


def tag_of(resource_type: str) -> str:
    """Return the key of the tag that our resources of a type carry: `IMAGE` for "image" and "snapshot", else `TAG`."""
    return IMAGE if resource_type in ("image", "snapshot") else TAG


def _read(permission: str, service: str = "ec2", prefix: str = "") -> Action:
    return Action(service, f"{prefix or service}:{permission}", READ)


def _change(permission: str, *targets: str) -> Action:
    return Action("ec2", f"ec2:{permission}", CHANGE, targets)


ACTIONS: dict[str, Action] = {
    "get_caller_identity": _read("GetCallerIdentity", "sts"),
    "get_role": _read("GetRole", "iam"),
    "get_parameter": _read("GetParameter", "ssm"),
    "get_service_quota": _read("GetServiceQuota", "service-quotas", "servicequotas"),
    "describe_images": _read("DescribeImages"),
    "describe_instance_type_offerings": _read("DescribeInstanceTypeOfferings"),
    "describe_instance_types": _read("DescribeInstanceTypes"),
    "describe_instances": _read("DescribeInstances"),
    "describe_placement_groups": _read("DescribePlacementGroups"),
    "describe_security_groups": _read("DescribeSecurityGroups"),
    "describe_snapshots": _read("DescribeSnapshots"),
    "describe_spot_price_history": _read("DescribeSpotPriceHistory"),
    "describe_subnets": _read("DescribeSubnets"),
    "describe_volumes": _read("DescribeVolumes"),
    "get_console_output": _read("GetConsoleOutput"),
    "create_security_group": Action("ec2", "ec2:CreateSecurityGroup", CREATE, ("security-group",), ("vpc",)),
    "create_placement_group": Action("ec2", "ec2:CreatePlacementGroup", CREATE, ("placement-group",)),
    "run_instances": Action(
        "ec2",
        "ec2:RunInstances",
        CREATE,
        ("instance", "volume", "network-interface", "spot-instances-request"),
        ("image", "subnet", "security-group", "placement-group"),
    ),
    "create_image": Action("ec2", "ec2:CreateImage", CREATE, ("image", "snapshot"), uses_tagged=("instance",)),
    "create_service_linked_role": Action("iam", "iam:CreateServiceLinkedRole", ROLE),
    "create_tags": _change("CreateTags", "security-group", "instance"),
    "authorize_security_group_ingress": _change("AuthorizeSecurityGroupIngress", "security-group"),
    "authorize_security_group_egress": _change("AuthorizeSecurityGroupEgress", "security-group"),
    "revoke_security_group_ingress": _change("RevokeSecurityGroupIngress", "security-group"),
    "revoke_security_group_egress": _change("RevokeSecurityGroupEgress", "security-group"),
    "terminate_instances": _change("TerminateInstances", "instance"),
    "delete_security_group": _change("DeleteSecurityGroup", "security-group"),
    "delete_placement_group": _change("DeletePlacementGroup", "placement-group"),
    "delete_volume": _change("DeleteVolume", "volume"),
    "deregister_image": _change("DeregisterImage", "image"),
    "delete_snapshot": _change("DeleteSnapshot", "snapshot"),
}
"""All calls that cpuft can make, by the names of boto3's methods. `cpuft provision aws --policy` is made from it."""


@dataclass(frozen=True)
class CallStep(Step):
    """A step that is a call to AWS. Its command is the equivalent command of AWS's command line."""

    method: str = ""
    """Key in `ACTIONS`."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Parameters, as boto3 takes them."""


def plan_call(method: str, why: str, region: str, parameters: Mapping[str, Any]) -> CallStep:
    """Return the step that makes a call; its command is the `aws` command that does the same. Nothing is called yet.

    Parameters
    ----------
    method
        Key in `ACTIONS`, such as "run_instances"; KeyError for another text.
    why
        Reason of the step, for the user.
    region
        AWS region, such as us-east-1. It is in the printed command only: the client that executes the step has its own.
    parameters
        Parameters of the call, as boto3 takes them. The plan prints them as JSON, so none of them is a secret.
    """
    command = ["aws", ACTIONS[method].service, method.replace("_", "-"), "--region", region]
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


Hook = Callable[[str, str, Mapping[str, Any]], None]
"""Called with "before" or "after", the method and its parameters for every request."""

_ATTEMPTS = 6
"""Attempts of a call whose outcome is unknown. Repeating it is safe: a call that took effect changes nothing again."""
_DELETE_SECONDS = 180.0
"""How long to retry a deletion. A security group is in use until the network interface of its last instance is gone."""
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
    "create_security_group": ("InvalidGroup.Duplicate",),
    "create_placement_group": ("InvalidPlacementGroup.Duplicate",),
    "authorize_security_group_ingress": ("InvalidPermission.Duplicate",),
    "authorize_security_group_egress": ("InvalidPermission.Duplicate",),
    "revoke_security_group_ingress": ("InvalidPermission.NotFound",),
    "revoke_security_group_egress": ("InvalidPermission.NotFound",),
    "terminate_instances": ("InvalidInstanceID.NotFound",),
    "delete_security_group": ("InvalidGroup.NotFound",),
    "delete_placement_group": ("InvalidPlacementGroup.Unknown",),
    "delete_volume": ("InvalidVolume.NotFound",),
    "create_image": ("InvalidAMIName.Duplicate",),
    "create_service_linked_role": ("InvalidInput", "EntityAlreadyExists"),
    "deregister_image": ("InvalidAMIID.NotFound", "InvalidAMIID.Unavailable"),
    "delete_snapshot": ("InvalidSnapshot.NotFound",),
}
"""Error codes that say that a call took effect before, because the response to it was lost."""
_TRANSIENT_CODES = (
    "InternalError",
    "ServiceUnavailable",
    "Unavailable",
    "RequestLimitExceeded",
    "Throttling",
    "ThrottlingException",
    "InvalidGroup.NotFound",
    "InvalidPlacementGroup.Unknown",
)
"""Error codes, beside all of HTTP 5xx, after which a call is repeated: a fault in AWS, too many requests, or a resource
that was created a moment ago and is not visible everywhere yet."""
_IN_USE_CODES = ("DependencyViolation", "InvalidPlacementGroup.InUse", "InvalidSnapshot.InUse")
"""Error codes of a resource that cannot be deleted yet, because a resource that is being deleted still uses it."""
_FORBIDDEN_CODES = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException")
_CREDENTIAL_CODES = (
    "AuthFailure",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "ExpiredTokenException",
    "RequestExpired",
    "OptInRequired",
)
_GIVE_CREDENTIALS = (
    "put an access key and its secret into ~/.aws/credentials or the environment, or log in with the AWS command line"
)


class CallRefusedError(CpuftError):
    """AWS refused a call.

    The message says whether permissions are missing, the credentials are not accepted or what else AWS says. Attributes
    are `code`, `message` and `is_transient`: True for HTTP status 500 and above, too many requests, and resources that
    are not visible yet, so that the call may be repeated.

    Parameters
    ----------
    method
        Key in `ACTIONS`; KeyError for another text.
    code, message
        Error code and message of AWS.
    status
        Status code of HTTP.
    """

    def __init__(self, method: str, code: str, message: str, status: int = 400) -> None:
        permission = ACTIONS[method].permission
        if code in _FORBIDDEN_CODES:
            text = (
                f"your AWS credentials lack the permission {permission}: add the policy that `cpuft provision aws "
                "--policy` prints to your IAM user or role"
            )
        elif code in _CREDENTIAL_CODES:
            text = f"AWS does not accept your credentials ({code}): {_GIVE_CREDENTIALS}"
        else:
            message = message.strip().rstrip(".")
            text = f"AWS refused {permission} ({code}: {message}): correct the cause, then run the command again"
        super().__init__(text)
        self.code, self.message = code, message
        self.is_transient = status >= 500 or code in _TRANSIENT_CODES


class AwsClient:
    """One AWS account in one region.

    All methods raise CpuftError when credentials are missing, AWS does not accept parameters, refuses the call
    (`CallRefusedError`) or does not answer. They raise KeyError for a method that is not in `ACTIONS`.

    Parameters
    ----------
    region
        Name of the region; empty for the region of the user's AWS configuration.
    hook
        Called before every request, and after every request that AWS accepted.
    sleep
        Pauses for a number of seconds between two attempts.

    Raises CpuftError when boto3 is not installed, the region is unknown or not given, or AWS_PROFILE names no profile.
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
            raise CpuftError(f"{error}: set AWS_PROFILE to a profile of ~/.aws/config") from None
        self.region = str(self._session.region_name or "")
        known = self._session.get_available_regions("ec2")
        if not self.region:
            raise CpuftError("no AWS region is given: add --region, such as --region us-east-1")
        if self.region not in known:
            raise CpuftError(f"AWS has no region {self.region!r:.60}: {suggest_names(self.region, known)}")
        self._clients: dict[tuple[str, bool], Any] = {}
        self._hook, self._sleep = hook, sleep

    def _get_client(self, method: str) -> Any:
        """Return boto3's client for a method.

        botocore repeats only calls that read. It would also repeat RunInstances when a zone has no capacity, because
        that error comes as HTTP 500; `execute` goes to another zone instead.
        """
        from botocore.config import Config

        service, retries = ACTIONS[method].service, ACTIONS[method].kind == READ
        if (service, retries) not in self._clients:
            policy: Any = {"total_max_attempts": _ATTEMPTS if retries else 1, "mode": "standard"}
            config = Config(connect_timeout=10, read_timeout=60, retries=policy)
            self._clients[service, retries] = self._session.client(service, config=config)
        return self._clients[service, retries]

    def _request(self, method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Make one request and return the response, with all of its pages.

        Raises CallRefusedError when AWS refuses it, TimeoutError when AWS does not answer, and CpuftError without
        credentials.
        """
        import botocore.exceptions as faults

        client = self._get_client(method)
        self._call_hook("before", method, parameters)
        try:
            if client.can_paginate(method) and "MaxResults" not in parameters:
                response = dict(client.get_paginator(method).paginate(**parameters).build_full_result())
            else:
                response = dict(getattr(client, method)(**parameters))
        except faults.ClientError as error:
            reason, status = error.response["Error"], error.response["ResponseMetadata"]["HTTPStatusCode"]
            raise CallRefusedError(
                method, str(reason.get("Code", "")), str(reason.get("Message", "")), status
            ) from None
        except (faults.NoCredentialsError, faults.PartialCredentialsError, faults.CredentialRetrievalError) as error:
            raise CpuftError(f"there are no AWS credentials ({error}): {_GIVE_CREDENTIALS}") from None
        except faults.ParamValidationError as error:
            raise CpuftError(
                f"AWS does not accept these values ({' '.join(str(error).split())}): correct the options"
            ) from None
        except faults.BotoCoreError as error:
            raise TimeoutError(f"{ACTIONS[method].permission}: {error}") from None
        self._call_hook("after", method, parameters)
        return response

    def _call_hook(self, when: str, method: str, parameters: Mapping[str, Any]) -> None:
        if self._hook:
            self._hook(when, method, parameters)

    @functools.cached_property
    def caller(self) -> str:
        """ARN of the user or role that makes the calls. AWS is asked once, with `get_caller_identity`."""
        return str(self.query("get_caller_identity")["Arn"])

    def query(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Make a call that changes nothing, and return its response with all pages, as boto3 returns it.

        With the parameter MaxResults, only one page is returned. A call of another kind than `READ` is an
        AssertionError.
        """
        assert ACTIONS[method].kind == READ, method
        return self._request_once(method, parameters)

    def _request_once(self, method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._request(method, parameters)
        except TimeoutError as error:
            raise CpuftError(f"AWS does not answer ({error}): check --region and the network of this machine") from None

    def dry_run(self, method: str, parameters: Mapping[str, Any]) -> None:
        """Check that AWS would allow a call, without making it. A call that has taken effect before passes, too.

        Parameters
        ----------
        method
            Key in `ACTIONS`, of a service that knows DryRun (EC2).

        Raises CallRefusedError when AWS would refuse the call, and CpuftError without credentials or an answer of AWS.
        """
        try:
            self._request_once(method, {**parameters, "DryRun": True})
        except CallRefusedError as error:
            if error.code not in ("DryRunOperation", *_ALREADY_DONE.get(method, ())):
                raise

    def execute(self, call: CallStep) -> str:
        """Make a call that changes something, and repeat it as long as its outcome is unknown.

        A call is repeated after a fault in AWS, too many requests or no answer (6 attempts, with pauses of up to 15 s),
        and for 3 minutes while a resource to delete is still in use. A call that has taken effect before counts as
        done.

        Returns
        -------
        "CODE: MESSAGE" when a zone has no capacity for the instances of `run_instances`; "" when the call took effect.

        Raises CallRefusedError when AWS refuses the call for another reason, and CpuftError when all attempts failed or
        credentials are missing.
        """
        problem, waited, failures = "", 0.0, 0
        while failures < _ATTEMPTS:
            try:
                self._request(call.method, call.parameters)
                return ""
            except CallRefusedError as error:
                if error.code in _ALREADY_DONE.get(call.method, ()):
                    return ""
                if call.method == "run_instances" and error.code in CAPACITY_CODES:
                    return f"{error.code}: {error.message}"
                is_in_use = error.code in _IN_USE_CODES and waited < _DELETE_SECONDS
                if not is_in_use and not error.is_transient:
                    raise
                failures += not is_in_use
                problem = str(error)
            except TimeoutError as error:
                problem, failures = f"AWS does not answer ({error})", failures + 1
            self._sleep(pause := min(2.0**failures, 15.0))
            waited += pause
        raise CpuftError(f"{problem}. Run the same command again: it continues where this one stopped")
