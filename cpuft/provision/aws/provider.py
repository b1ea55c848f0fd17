"""The provider of clusters of instances that are rented from AWS."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from cpuft.errors import CpuftError, counted
from cpuft.hosts.hostfile import Host
from cpuft.hosts.registry import FILE_NAME, Entry
from cpuft.hosts.transport import SshTransport
from cpuft.plans import Plan
from cpuft.provision.aws.client import CAPACITY_CODES, AwsClient, CallError, CallStep, plan_call
from cpuft.provision.aws.cost import describe_cost, describe_instances, describe_price, find_price, find_price_of
from cpuft.provision.aws.facts import (
    Offer,
    Resources,
    find_clusters,
    find_host_key,
    find_offer,
    find_own_address,
    find_resources,
)
from cpuft.provision.aws.lease import format_time, parse_lease, parse_limit
from cpuft.provision.aws.nodes import LeaseError, Nodes
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.aws.plan import (
    NoCapacityError,
    RentalFacts,
    check_offer,
    check_rental,
    check_ssh_config,
    choose_zone,
    find_lease,
    make_request,
    needs_offer,
    parse_ssh_from,
    plan_lease_extension,
    plan_rental,
    plan_rental_down,
)
from cpuft.provision.base import Ask, Provider, Say, run_plan
from cpuft.provision.cluster_files import read_files
from cpuft.provision.servers import ClusterFacts

_BOOT_SECONDS = 300.0
"""Time limit for instances to reach the state "running", and again to accept ssh connections."""
_END_SECONDS = 600.0
"""Time limit for instances that shut down to be terminated."""
_APPEAR_SECONDS = 30.0
"""Time limit for instances that were requested a moment ago to appear in AWS's lists."""
_POLL_SECONDS = 2.0
_NO_INSTANCE = f"i-{'0' * 17}"
"""Id for checks of permissions when there is no instance yet."""
_YOUNG_SECONDS = 120.0
"""How long after a request its instances may still be missing in AWS's lists."""


@dataclass(frozen=True)
class Services:
    """What a cluster on AWS needs from outside, which tests replace."""

    open_client: Callable[[str], AwsClient] = AwsClient
    """Opens a client for a region; "" is the one of the AWS configuration."""
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.time
    """Returns seconds since the epoch."""
    find_address: Callable[[], str] = find_own_address
    uses_ssh: bool = True
    """Whether to log in to the instances; otherwise they are rented only."""


class Aws(Provider[AwsConfig, RentalFacts]):
    """A cluster of instances that are rented from AWS, which are found by their tags.

    This machine keeps only the keys, and the files that say how to reach the instances. The constructor does not ask
    AWS; CpuftError: the name, the lease or the region is not valid, or boto3 is missing.
    """

    kind = "aws"

    def __init__(
        self,
        config: AwsConfig,
        environ: Mapping[str, str],
        entry: Entry | None = None,
        services: Services | None = None,
    ) -> None:
        super().__init__(config, environ, entry)
        parse_limit(config.lease_limit, parse_lease(config.lease))
        self.services = services or Services()
        self.client = self.services.open_client(config.region)
        wheels = Path(config.wheels).absolute().as_posix() if config.wheels else ""
        self.config = replace(config, region=self.client.region, wheels=wheels)
        self.summary = f"{config.nodes} x {config.type}"
        self._refused: dict[tuple[str, str], str] = {}
        """Why there was no capacity, by (zone, market)."""
        self._offer: Offer | None = None
        self._price = ""
        self._waits = False
        """Whether to wait until instances start or end, which commands that change nothing do not."""
        self._known: set[str] = set()
        """Ids of the instances that `make` has found or started. Any others cost what the user has not agreed to."""
        self._say: Say = lambda text: None

    def check(self) -> None:
        """Check what every kind does; CpuftError, too, if a cluster of this name is recorded in another region."""
        super().check()
        if other := self._find_other():
            # The new record would replace the one without which nobody finds the instances there.
            raise CpuftError(
                f"{self.name} is a cluster {other} already: choose another --name, or remove it first with `cpuft "
                f"provision down {self.name}`"
            )

    def gather(self) -> RentalFacts:
        """Return what exists in AWS; when nothing is missing there, also what the instances say.

        `make` waits here until the instances run and accept ssh connections, and schedules missing shutdowns. Raises
        NoCapacityError when every zone has refused, LeaseError when instances would not terminate themselves, and
        CpuftError when AWS has ended one.
        """
        facts = self._gather_rental()
        while self._waits and (starting := self._find_starting(facts.resources)):
            self._wait_for("running", starting, _BOOT_SECONDS)
            facts = self._gather_rental()
        if self.services.uses_ssh and not plan_rental(self.config, facts).stages:
            return replace(facts, servers=self._gather_servers(facts.resources))
        return facts

    def _find_starting(self, resources: Resources) -> set[str]:
        """Return the ids of instances that should run and do not, be it that AWS has ended them."""
        running = {one.id for one in resources.live if one.state == "running"}
        return (self._known | {one.id for one in resources.live}) - running

    def _gather_rental(self) -> RentalFacts:
        facts = self.gather_remains()
        resources, ssh_from = facts.resources, self.config.ssh_from or self.services.find_address()
        check_rental(self.config, resources)
        if needs_offer(self.config, resources) and not self._offer:
            offer = find_offer(self.client, self.config)
            check_offer(self.config, offer, self.client.region)
            self._offer = offer
        return replace(facts, ssh_from=parse_ssh_from(ssh_from), offer=self._offer)

    def _find_other(self) -> str:
        """Return of which other kind or region this machine has recorded a cluster of this name; "" for none."""
        entry = self.find_record()
        if not entry or entry.kind != self.kind:
            return f"of kind {entry.kind}" if entry else ""
        region = entry.options.get("region") or self.client.region
        return f"in {region}" if region != self.client.region else ""

    def _find_resources(self) -> Resources:
        return find_resources(self.client, self.name, self.services.now())

    def gather_remains(self) -> RentalFacts:
        """Return what exists in AWS and here; no files if this machine has recorded another cluster of this name."""
        return RentalFacts(
            self._find_resources(),
            # The directory belongs to the cluster in its record. This one is then as on another machine.
            {} if self._find_other() else read_files(self.directory, Path(self.hostfile)),
            self.directory.as_posix(),
            self.hostfile,
            self.client.region,
            refused=self._refused,
        )

    def _gather_servers(self, resources: Resources) -> ClusterFacts:
        nodes = Nodes(self.config, resources, self.environ, self.hostfile)
        seconds = _BOOT_SECONDS if self._waits else 0.0
        nodes.connect(partial(find_host_key, self.client), seconds, self.services.now, self.services.sleep)
        if self._waits:
            nodes.secure_lease(self._say)
        return nodes.gather()

    def _wait_until(self, is_done: Callable[[Resources], bool], seconds: float) -> Resources:
        end = self.services.now() + seconds
        while not is_done(found := self._find_resources()) and self.services.now() < end:
            self.services.sleep(_POLL_SECONDS)
        return found

    def _wait_for(self, state: str, wanted: set[str], seconds: float) -> None:
        """Wait until AWS lists all instances with the ids `wanted` as "running", or as "terminated" or not at all.

        Raises CpuftError when AWS has ended one instead, as it does when it may not use the key of their disks.
        """

        def find_lacking(found: Resources) -> set[str]:
            listed = wanted & {one.id for one in found.instances} if state == "terminated" else wanted
            return listed - {one.id for one in found.instances if one.state in (state, "terminated")}

        found = self._wait_until(lambda found: not find_lacking(found), seconds)
        if find_lacking(found):
            down = f"`cpuft provision down {self.name}`"
            advice = f"remove them with {down}" if state == "running" else f"look at the EC2 console, and repeat {down}"
            raise CpuftError(
                f"after {seconds / 60:.0f} minutes, not all instances of {self.name} are {state}: {advice}"
            )
        for one in found.instances:
            if one.id in wanted and one.state != state:
                raise CpuftError(
                    f"AWS has ended instance {one.id} of {self.name} ({one.reason or 'it does not say why'}): correct "
                    f"the cause and run the same command again, or `cpuft provision down {self.name}`"
                )

    def confirm(self, ask: Ask) -> None:
        """If instances are missing, check by dry runs the permissions to rent them, and ask the user about the price.

        With --yes, the price is shown and nothing is asked. Raises CpuftError: the cluster can never become what was
        asked for, AWS would refuse a call, or the user says no.
        """
        facts = self._gather_rental()
        self._known = {one.id for one in facts.resources.live}
        missing = self.config.nodes - len(facts.resources.live)
        if not missing or not facts.offer:
            return
        self._check_permissions(facts, facts.offer)
        price = find_price(self.config.type, self.client.region, facts.offer.spot_prices)
        now, (until, limit) = facts.resources.now, find_lease(self.config, facts.resources)
        self._price = describe_price(price, self.config, missing, now, until, limit)
        if self.config.yes:
            self._say(self._price)
        elif not ask(f"{self._price}. Rent them?"):
            raise CpuftError(f"nothing was rented: answer yes at a terminal, or add --yes. The price: {self._price}")

    def _check_permissions(self, facts: RentalFacts, offer: Offer) -> None:
        """Ask AWS in dry runs whether it would allow the planned calls, and reading the consoles of the instances."""
        zone, _ = choose_zone(self.config, facts.resources, offer, {})
        missing = self.config.nodes - len(facts.resources.live)
        request = make_request(self.config, facts.resources, offer, zone, missing)
        start = plan_call("run_instances", "start instances", self.client.region, request)
        look = plan_call("get_console_output", "read host keys", self.client.region, {"InstanceId": _NO_INSTANCE})
        for step in (start, look, *(step for stage in plan_rental(self.config, facts).stages for step in stage)):
            if isinstance(step, CallStep):
                self.client.dry_run(step)

    def plan(self, facts: RentalFacts) -> Plan:
        """Plan what is missing in AWS, or if nothing is, on the instances. CpuftError: that cannot be made."""
        rental = plan_rental(self.config, facts)
        if rental.stages or not facts.servers:
            return replace(rental, notes=tuple(filter(None, (self._price, *rental.notes))))
        return Nodes(self.config, facts.resources, self.environ, self.hostfile).plan(facts.servers)

    def run(self, plan: Plan, say: Say) -> None:
        """Execute a plan; calls to AWS are made one after another.

        A zone without capacity is no error: the next plan takes another zone. CpuftError: a step or a call fails.
        """
        for are_calls, stages in itertools.groupby(plan.stages, lambda stage: isinstance(stage[0], CallStep)):
            if are_calls:
                for step in (step for stage in stages for step in stage):
                    self._make_call(cast(CallStep, step), say)
            else:
                run_plan(replace(plan, stages=tuple(stages)), say)

    def _make_call(self, call: CallStep, say: Say) -> None:
        say(call.why)
        try:
            answer = self.client.execute(call)
        except CallError as error:
            if call.method != "run_instances" or error.code not in CAPACITY_CODES:
                raise
            zone = call.parameters["Placement"]["AvailabilityZone"]
            market = "spot" if "InstanceMarketOptions" in call.parameters else "on-demand"
            self._refused[zone, market] = f"{error.code}: {error.message}"
            say(f"{zone} has no {market} capacity: {self._refused[zone, market]}")
            return
        if call.method == "run_instances":
            self._known |= {one["InstanceId"] for one in answer["Instances"]}
        if call.method == "terminate_instances":
            ids = call.parameters["InstanceIds"]
            # AWS terminates none of the instances if it does not know one of them any more.
            for one in () if answer else ids:
                self.client.execute(replace(call, parameters={"InstanceIds": [one]}))
            self._wait_for("terminated", set(ids), _END_SECONDS)
        if call.method == "create_service_linked_role" and self._offer:
            self._offer = replace(self._offer, has_spot_role=True)

    def make(self, say: Say, ask: Ask) -> str:
        """Make or repair the cluster, and wait until it is ready; the sentence for the user ends with the lease's end.

        When no zone has capacity (NoCapacityError) and nothing runs yet, all that was made is removed. When instances
        would not terminate themselves at the end of their lease, the cluster is removed (CpuftError).
        """
        self._waits, self._say = True, say
        try:
            sentence = super().make(say, ask)
        except LeaseError as error:
            say(f"terminate the instances: {error}")
            try:
                self.down(say)
            except CpuftError as failure:
                raise CpuftError(f"{error}. They cost money and could not be terminated: {failure}") from None
            ended = f"All instances of {self.name} were terminated: check systemd and cloud-init in the AMI"
            raise CpuftError(f"{error}. {ended}") from None
        except NoCapacityError:
            if not self._find_resources().live:
                self.down(say)
            raise
        finally:
            self._waits = False
        return f"{sentence}; {self._describe_end()}"

    def _describe_end(self) -> str:
        group = self._find_resources().group
        return f"the instances terminate themselves at {format_time(group.until if group else 0)}"

    def down(self, say: Say) -> str:
        """Remove the cluster, including instances that appear late; wait until they are terminated, up to 10 minutes.

        The sentence for the user says what the cluster has cost. If this machine has recorded another cluster of this
        name, that is left alone. Raises CpuftError: somebody else made the cluster, or instances do not end in time.
        """
        mine = {one.id for one in self._find_with_late_instances().instances}
        sentence = super().down(say)
        if other := self._find_other():
            sentence += f" from {self.client.region}, and cluster {self.name} {other} was left as it is"
        if not mine:
            return sentence
        instances = [one for one in self._find_resources().instances if one.id in mine]
        cost = describe_cost(find_price_of(self.client, instances), instances, self.services.now())
        return f"{sentence}; it has cost {cost}; disks and network traffic cost extra"

    def _find_with_late_instances(self) -> Resources:
        """Find the cluster's resources, up to 30 s after a killed process may have requested instances."""
        found, record = self._find_resources(), self.directory / FILE_NAME
        recorded = record.stat().st_mtime if record.exists() and not self._find_other() else 0.0
        generation = found.group.generation if found.group else 0
        if self._refused or found.now - max(recorded, generation) > _YOUNG_SECONDS:
            return found
        return self._wait_until(lambda now: generation in {one.generation for one in now.instances}, _APPEAR_SECONDS)

    def plan_down(self, facts: RentalFacts) -> Plan:
        """Plan the deletion of what is left in AWS and here. Raises CpuftError: somebody else made the cluster."""
        return plan_rental_down(self.name, facts)

    def plan_extension(self, lease: str) -> Plan:
        """Plan that the lease ends `lease` (90m, 4h, 2d) from now, which may be earlier than before. Raises CpuftError:
        `lease` is not valid, or the cluster has no instances, is somebody else's, or has no ssh files on this machine.
        """
        facts = self.gather_remains()
        until = int(facts.resources.now) + parse_lease(lease)
        plan = plan_lease_extension(self.name, facts, until)
        if not self.services.uses_ssh:
            return replace(plan, stages=plan.stages[:1])
        transport = SshTransport(check_ssh_config(self.name, facts), here="")
        prefixes = {one.private: transport.command_prefix(Host(one.private)) for one in facts.resources.live}
        return replace(plan, command_prefixes=prefixes)

    def extend(self, lease: str, say: Say) -> str:
        """Execute `plan_extension`; return a sentence that says when instances terminate. CpuftError: a step fails."""
        self.run(self.plan_extension(lease), say)
        return f"cluster {self.name}: {self._describe_end()}"

    def describe_hosts(self) -> list[str]:
        """Return a line about the lease and the cost, and one for each instance as AWS lists it."""
        resources = self._find_resources()
        return describe_instances(resources, find_price_of(self.client, resources.instances))


def describe_region(region: str, services: Services | None = None) -> str:
    """Return lines, with newlines, on all clusters of the account in a region, or on none. CpuftError: AWS does not
    answer.
    """
    services = services or Services()
    client, lines = services.open_client(region), list[str]()
    for name, found in find_clusters(client, services.now()).items():
        own = describe_instances(found, find_price_of(client, found.instances))
        lines += [f"cluster {name} (aws), {counted(len(found.live), 'node')}", *(f"  {line}" for line in own)]
    return "".join(f"{line}\n" for line in lines or [f"there is no cluster in region {region}"])
