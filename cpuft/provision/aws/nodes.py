"""The instances of a rented cluster as servers over ssh: the same steps as for servers that are there anyway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

from cpuft.errors import CpuftError
from cpuft.hosts.door import Door, attempt
from cpuft.hosts.hostfile import Host
from cpuft.hosts.ssh import KEY_CHANGED, KEY_UNKNOWN, HostError
from cpuft.options.clusters import AwsConfig, HostsConfig
from cpuft.provision.aws.facts import Instance
from cpuft.provision.ownership import read_raw
from cpuft.provision.servers.doing import Servers
from cpuft.provision.servers.planning import Facts
from cpuft.provision.sshfiles import Member

_LOOK_AGAIN_SECONDS = 2.0


class Nodes(Servers):
    """Known to each other by private addresses, and reached from here by public ones.

    All show the host key that they were given at birth, so that the first connection is strict already.
    """

    kind = "aws"

    def __init__(
        self, config: AwsConfig, instances: tuple[Instance, ...], environ: Mapping[str, str], hostfile: str
    ) -> None:
        hosts = ",".join(one.private for one in instances)
        own = HostsConfig(hosts, config.name, "root", prefix=config.prefix, wheels=config.wheels)
        super().__init__(own, environ)
        self.hostfile = hostfile
        self.config = replace(self.config, key=str(self.directory / "id_ed25519"))
        self.members = tuple(Member(one.private, one.private, "root", reached=one.public) for one in instances)
        planted = " ".join(read_raw(self.directory / "host_key.pub").split()[:2])
        self.keys = {member.known_name: planted for member in self.members} | self.keys
        self._options = {key: str(value) for key, value in asdict(replace(config, yes=False)).items()}

    def _look(self, door: Door) -> Facts:
        return replace(super()._look(door), kind=self.kind, options=self._options)

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
