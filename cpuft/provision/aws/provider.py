"""A cluster of instances that are rented from AWS: what is asked of it, and how its plans are carried out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.hosts.hostfile import Host
from cpuft.hosts.registry import FILE_NAME, Entry
from cpuft.hosts.transport import Transport
from cpuft.plan import Plan, Step
from cpuft.provision.aws import plan as plans
from cpuft.provision.aws.client import ACTIONS, Cloud, parse_call
from cpuft.provision.aws.facts import (
    Found,
    Instance,
    Offer,
    find_clusters,
    find_offer,
    find_own_address,
    find_tagged,
    read_table,
)
from cpuft.provision.aws.lease import format_time, parse_lease, parse_limit
from cpuft.provision.aws.nodes import LeaseError, Nodes
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.aws.plan import Facts, NoCapacityError, check_offer, parse_ssh_from, plan_rental
from cpuft.provision.aws.price import (
    describe_bill,
    describe_cluster,
    describe_instances,
    describe_price,
    find_costs,
    find_price,
)
from cpuft.provision.base import Ask, Provider, Say, run_stages
from cpuft.provision.cluster_files import read_files
from cpuft.provision.servers import Facts as ServersFacts

_BOOT_SECONDS = 300.0
_END_SECONDS = 600.0
_POLL_SECONDS = 2.0
_YOUNG_SECONDS = 120.0


@dataclass(frozen=True)
class Edge:
    """What a rented cluster needs of the world, for those who bring another one."""

    open_cloud: Callable[[str], Cloud] = Cloud
    """Of a region."""
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.time
    find_address: Callable[[], str] = find_own_address
    late_seconds: float = 30.0
    """How long something that was asked for may take to appear."""
    logs_in: bool = True
    """Whether instances are logged into; without, they are rented and no more."""


@dataclass(frozen=True)
class Everything:
    """What there is: at AWS, and on the instances once they are all there."""

    rental: Facts
    servers: ServersFacts | None = None


class Aws(Provider[AwsConfig, Everything]):
    """Instances, found by their tags: what is remembered here is keys, and how to reach them."""

    kind = "aws"
    options = AwsConfig

    def __init__(
        self, config: AwsConfig, environ: Mapping[str, str], entry: Entry | None = None, edge: Edge | None = None
    ) -> None:
        super().__init__(config, environ, entry)
        parse_limit(config.lease_limit, parse_lease(config.lease))
        self.edge = edge or Edge()
        self.cloud = self.edge.open_cloud(config.region)
        wheels = str(Path(config.wheels).absolute()) if config.wheels else ""
        spot = config.spot or config.spot_or_demand
        self.config = replace(config, region=self.cloud.region, wheels=wheels, spot=spot)
        self.summary = f"{config.nodes} x {config.type}"
        self._refused: dict[str, str] = {}
        self._offer: Offer | None = None
        self._quote = ""
        self._patient = False
        """Whether to wait for what AWS is about to do: only those who change something do."""
        self._on_demand = False
        """Whether no zone has spot instances for us, and others will do."""
        self._say: Say = lambda text: None
        self._last: tuple[Instance, ...] = ()
        """What AWS told of the instances when the cluster was last looked at to be taken down."""

    @classmethod
    def find_unrecorded(cls, name: str, environ: Mapping[str, str], region: str) -> Aws | None:
        """Return the cluster that tags in a region may tell of; None where no region is given."""
        return cls(AwsConfig(name=name, region=region), environ) if region else None

    @classmethod
    def describe_region(cls, region: str, edge: Edge | None = None) -> list[str]:
        """Return lines that describe all clusters in a region that this account rents, whoever made them."""
        edge = edge or Edge()
        cloud, lines = edge.open_cloud(region), list[str]()
        for name, (group, instances) in find_clusters(cloud).items():
            lines += describe_cluster(name, group, instances, edge.now(), find_costs(cloud, instances))
        return lines

    @property
    def _wanted(self) -> AwsConfig:
        """What is to be rented now."""
        return replace(self.config, spot=False) if self._on_demand else self.config

    def gather(self) -> Everything:
        """What AWS tells, and what this machine remembers; then what the instances say."""
        facts = self._look()
        if self.edge.logs_in and not plan_rental(self.config, facts).stages:
            facts = self._await_running(facts) if self._patient else facts
            if not plan_rental(self.config, facts).stages:
                return Everything(facts, self._gather_servers(facts.found))
        return Everything(facts)

    def _look(self) -> Facts:
        facts = self._facts()
        found, place = facts.found, self.config.ssh_from or self.edge.find_address()
        plans.check_rental(self.config, found)
        if plans.needs_offer(self.config, found) and not self._offer:
            self._offer = check_offer(self._wanted, found, find_offer(self.cloud, self._wanted), self.cloud.region)
        return replace(facts, address=parse_ssh_from(place), offer=self._offer)

    def _facts(self) -> Facts:
        found = find_tagged(self.cloud, self.name, self.edge.now())
        files = read_files(self.directory, Path(self.hostfile))
        own = Facts(found, files, str(self.directory), self.hostfile, self.cloud.region, refused=self._refused)
        return replace(own, on_demand=self._on_demand)

    def _gather_servers(self, found: Found) -> ServersFacts:
        nodes = self._nodes(found)
        if self._patient:
            nodes.wait(_BOOT_SECONDS, self.edge.now, self.edge.sleep)
            nodes.secure_lease(self._say)
        return nodes.gather()

    def _nodes(self, found: Found) -> Nodes:
        return Nodes(self.config, found.live, self.environ, self.hostfile, found.group)

    def _await_running(self, facts: Facts) -> Facts:
        """Until all instances run, or fewer are left. Raises CpuftError when that takes too long."""
        end = self.edge.now() + _BOOT_SECONDS
        while any(one.state != "running" or not one.public for one in facts.found.live):
            if self.edge.now() > end:
                told = plans.name_states(facts.found.instances)
                raise CpuftError(f"instances of {self.name} do not start ({told}): cpuft provision down {self.name}")
            self.edge.sleep(_POLL_SECONDS)
            facts = replace(facts, found=find_tagged(self.cloud, self.name, self.edge.now()))
        return facts

    def confirm(self, ask: Ask) -> None:
        """Whether the price is right, when something is to be rented; and before that, whether we would be let."""
        facts = self._look()
        missing = self.config.nodes - len(facts.found.live)
        if not missing or not facts.offer:
            return
        self._try_out(facts)
        self._quote = self._make_quote(facts, missing)
        if self.config.yes:
            self._say(self._quote)
        elif not ask(f"{self._quote}. Rent them?"):
            raise CpuftError(f"nothing was rented ({self._quote}): answer yes at a terminal, or say --yes")

    def _make_quote(self, facts: Facts, missing: int) -> str:
        assert facts.offer
        lease, now, group = parse_lease(self.config.lease), facts.found.now, facts.found.group
        until = group.until if group else now + lease
        limit = group.limit if group else now + parse_limit(self.config.lease_limit, lease)
        spot = {zone.name: zone.spot_price for zone in facts.offer.zones}
        price = find_price(self.config.type, self.cloud.region, read_table(), spot)
        return describe_price(price, self._wanted, missing, now, until, limit)

    def _try_out(self, facts: Facts) -> None:
        """Ask AWS, call by call, whether it would do what is planned. Raises CpuftError when it would not."""
        assert facts.offer
        zone = plans.choose_zone(self._wanted, facts.found, facts.offer, {})
        missing = self.config.nodes - len(facts.found.live)
        request = plans.make_request(self._wanted, facts.found, facts.offer, zone, missing)
        self.cloud.try_out("run_instances", request)
        for step in (step for stage in plan_rental(self.config, facts).stages for step in stage):
            call = parse_call(step)
            if call and not call.files and ACTIONS[call.method].service == "ec2":
                self.cloud.try_out(call.method, call.parameters)

    def plan(self, facts: Everything) -> Plan:
        """What is missing at AWS; then on the instances."""
        rental = plan_rental(self.config, facts.rental)
        if rental.stages or not facts.servers:
            return replace(rental, notes=tuple(filter(None, (self._quote, *rental.notes))))
        return self._nodes(facts.rental.found).plan(facts.servers)

    def run(self, plan: Plan, say: Say) -> None:
        """Calls are made from here, one by one; other steps run as those of any plan."""
        for are_calls, stages in itertools.groupby(plan.stages, lambda stage: bool(parse_call(stage[0]))):
            if are_calls:
                for step in (step for stage in stages for step in stage):
                    self._make_call(step, say)
            else:
                run_stages(replace(plan, stages=tuple(stages)), say)

    def _make_call(self, step: Step, say: Say) -> None:
        call = parse_call(step)
        assert call, step
        say(step.why)
        if refused := self.cloud.do(call):
            zone = call.parameters["Placement"]["AvailabilityZone"]
            say(f"{zone} has none: {refused}")
            self._refused[zone] = refused
        if call.method == "create_service_linked_role" and self._offer:
            self._offer = replace(self._offer, spot_role=True)

    def make(self, say: Say, ask: Ask) -> str:
        """As for all clusters; where no zone has any instance for us, nothing is left.

        Nor is anything left where instances would not end themselves with their lease: they would cost money for ever.
        """
        self._patient, self._say = True, say
        try:
            made = self._make_on_any_market(say, ask)
        except LeaseError as error:
            say(f"end the instances: {error}")
            try:
                self.down(say)
            except CpuftError as trouble:
                raise CpuftError(f"{error}; they cost money, and could not be ended ({trouble})") from None
            raise CpuftError(
                f"{error}: all instances of {self.name} were ended, look at systemd and cloud-init of the image"
            ) from None
        except NoCapacityError:
            if not self._facts().found.live:
                # Every zone has said no: nothing can appear late.
                self.edge = replace(self.edge, late_seconds=0.0)
                self.down(say)
            raise
        group = self._facts().found.group
        return f"{made}; it ends itself at {format_time(group.until if group else 0)}"

    def _make_on_any_market(self, say: Say, ask: Ask) -> str:
        try:
            return super().make(say, ask)
        except NoCapacityError as error:
            if not self.config.spot_or_demand:
                raise
            say(f"on demand instead: {error}")
        # The price was agreed to with the one of spot instances.
        self.config = replace(self.config, yes=True)
        self._on_demand, self._offer = True, None
        self._refused.clear()
        return super().make(say, ask)

    def down(self, say: Say) -> str:
        """Leave nothing of it anywhere, nor what appears late; what it has cost."""
        self._patient = True
        gone = super().down(say)
        bill = describe_bill(find_costs(self.cloud, self._last), self._last, self.edge.now()) if self._last else ""
        return "; ".join(filter(None, (gone, bill)))

    def gather_remains(self) -> Everything:
        """What there is, when nothing is about to end or to appear any more."""
        facts = self._facts()
        start = self.edge.now()
        while self._patient and self._may_change(facts, self.edge.now() - start):
            self.edge.sleep(_POLL_SECONDS)
            facts = self._facts()
        if facts.found.group or not self._last:
            self._last = facts.found.instances
        return Everything(facts)

    def _may_change(self, facts: Facts, waited: float) -> bool:
        states = {one.state for one in facts.found.instances}
        if states - {"terminated"}:
            return states <= {"terminated", "shutting-down"} and waited < _END_SECONDS
        generation = facts.found.group.generation if facts.found.group else -1
        accounted = any(one.generation == generation for one in facts.found.instances)
        entry = self.directory / FILE_NAME
        made = entry.stat().st_mtime if entry.exists() else 0.0
        young = plans.is_young(facts.found, made, _YOUNG_SECONDS)
        return not accounted and young and waited < self.edge.late_seconds

    def plan_down(self, facts: Everything) -> Plan:
        """What is left, at AWS and here."""
        return plans.plan_rental_down(self.name, facts.rental)

    def plan_extension(self, lease: str) -> Plan:
        """The lease is to end so long from now. Raises CpuftError: there is no such cluster, or it has ended."""
        facts = self._facts()
        until = int(facts.found.now) + parse_lease(lease)
        plan = plans.plan_extension(self.name, facts, until)
        if self.edge.logs_in:
            transport = Transport(plans.check_config(self.name, facts), elsewhere=True)
            ways = {one.private: transport.way(Host(one.private)) for one in facts.found.live}
            tell = plans.tell_instances(facts.found, until)
            note = plans.plan_lease_note(self.name, facts, until)
            plan = replace(plan, stages=(*plan.stages, tell, *note), ways=ways)
        return plan

    def extend(self, lease: str, say: Say) -> str:
        """Let the lease end so long from now. Raises CpuftError as the plan of it."""
        self.run(self.plan_extension(lease), say)
        group = self._facts().found.group
        return f"cluster {self.name} ends itself at {format_time(group.until if group else 0)}"

    def describe_hosts(self) -> list[str]:
        """An instance a line; its age, its lease and what it has cost."""
        found = self._facts().found
        price = find_costs(self.cloud, found.instances)
        return describe_instances(found.group, found.instances, found.now, price)
