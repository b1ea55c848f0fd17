"""The instances of a rented cluster as servers over ssh: the same steps as for servers that are there anyway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from cpuft.errors import CpuftError
from cpuft.hosts.door import Door, attempt
from cpuft.hosts.hostfile import Host
from cpuft.hosts.ssh import KEY_CHANGED, KEY_UNKNOWN, HostError
from cpuft.options.clusters import AwsConfig, HostsConfig
from cpuft.plan import Plan
from cpuft.provision.aws.facts import Instance
from cpuft.provision.aws.hostkeys import choose_keys, known_keys, plan_rotation
from cpuft.provision.aws.lease import RENEWAL
from cpuft.provision.aws.planning import find_notice, remember
from cpuft.provision.ownership import read_raw
from cpuft.provision.servers.doing import Servers
from cpuft.provision.servers.planning import Facts
from cpuft.provision.sshfiles import Member

_LOOK_AGAIN_SECONDS = 2.0


class Nodes(Servers):
    """Known to each other by private addresses, and reached from here by public ones.

    All show the host key that they were given at birth, so that the first connection is strict already; then each makes
    one of its own.
    """

    kind = "aws"
    elsewhere = True

    def __init__(
        self, config: AwsConfig, instances: tuple[Instance, ...], environ: Mapping[str, str], hostfile: str
    ) -> None:
        hosts = ",".join(one.private for one in instances)
        own = HostsConfig(hosts, config.name, "root", prefix=config.prefix, wheels=config.wheels)
        super().__init__(own, environ)
        self.hostfile = hostfile
        self.config = replace(self.config, key=str(self.directory / "id_ed25519"))
        self.members = tuple(
            Member(one.private, one.private, "root", reached=one.public, mark=one.id) for one in instances
        )
        self._given = " ".join(read_raw(self.directory / "host_key.pub").split()[:2])
        known = read_raw(self.directory / "known_hosts")
        self.keys = {member.known_name: known_keys(known, member) or self._given for member in self.members}
        self._asked = config

    def _look(self, door: Door) -> Facts:
        facts = super()._look(door)
        servers = tuple(
            (replace(member, key=choose_keys(self._given, own.host_keys)), own) for member, own in facts.servers
        )
        facts = replace(facts, servers=servers, kind=self.kind, options=remember(self._asked))
        return replace(facts, notice=find_notice(self._asked), renewal=RENEWAL, may_lose_master=True)

    def plan(self, facts: Facts) -> Plan:
        """What is missing; when nothing is, the next step of the hosts' own keys."""
        plan = super().plan(facts)
        steps = () if plan.stages else plan_rotation(facts.servers, self._given)
        return replace(plan, stages=(steps,)) if steps else plan

    def wait(self, seconds: float, now: Callable[[], float], sleep: Callable[[float], None]) -> None:
        """Until all let us in. Raises CpuftError: some do not in time, or one shows a key that is not the given one."""
        end = now() + seconds
        with self._door(()) as door:
            while True:
                answers = attempt(lambda one: door.run(Host(one.address), ("true",)), self.members)
                troubles = [one for one in answers if isinstance(one, CpuftError)]
                if not troubles:
                    return
                strange = [one for one in troubles if isinstance(one, HostError) and one.kind in _STRANGE]
                if strange or now() > end:
                    told = "; ".join(str(one) for one in strange or troubles)
                    raise CpuftError(f"{told}; they cost money: cpuft provision down {self.name}")
                sleep(_LOOK_AGAIN_SECONDS)


_STRANGE = (KEY_CHANGED, KEY_UNKNOWN)
