"""The instances of a cluster as servers over ssh: their environment, their lease and their host keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from cpuft.errors import CpuftError
from cpuft.hosts.hostfile import Host
from cpuft.hosts.registry import Entry
from cpuft.hosts.ssh_config import Member
from cpuft.hosts.transport import KEY_CHANGED, KEY_UNKNOWN, HostError, Transport, try_hosts
from cpuft.provision.aws.client import CallError
from cpuft.provision.aws.facts import Resources
from cpuft.provision.aws.lease import CHECK_TIMER, Timer, make_schedule_command, parse_timer
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.aws.plan import make_entry
from cpuft.provision.options import HostsConfig
from cpuft.provision.servers import Servers

_POLL_SECONDS = 2.0


class LeaseError(CpuftError):
    """Instances do not terminate themselves when their lease ends, and cannot be made to."""


class Nodes(Servers):
    """The instances as servers. They know each other by private addresses; this machine uses their public ones.

    They are the live instances of `resources`, which have a security group.
    """

    kind = "aws"
    can_lose_head = True
    here = ""  # an instance in another network may have the address of this machine

    def __init__(self, config: AwsConfig, resources: Resources, environ: Mapping[str, str], hostfile: str) -> None:
        instances, group = resources.live, resources.group
        assert group, "a plan without a security group is not empty"
        hosts = ",".join(one.private for one in instances)
        servers_config = HostsConfig(hosts, config.name, "root", prefix=config.prefix, wheels=config.wheels)
        super().__init__(servers_config, environ)
        self.hostfile = hostfile
        self.config = replace(self.config, key=(self.directory / "id_ed25519").as_posix())
        self.members = tuple(
            Member(one.private, one.private, "root", reached=one.public, mark=one.id) for one in instances
        )
        marks = {one.known_name: one.mark for one in self.members}
        # The key of an instance that had the same address before is left out.
        self.keys = {name: key for name, key in self.keys.items() if key.split()[2:] == [marks.get(name)]}
        self._aws_config = config
        self._has_spot = any(one.spot for one in instances)
        self._until, self._limit = group.until, max(group.until, group.limit)

    def _make_entry(self) -> Entry:
        return make_entry(self._aws_config, self.directory.as_posix(), self.hostfile, self._until, self._has_spot)

    def secure_lease(self, say: Callable[[str], None]) -> None:
        """Verify over ssh that all instances terminate themselves when their lease ends, or make them do so.

        Raises LeaseError when instances still would not terminate themselves afterwards, or cannot be asked.
        """
        with self._temporary_transport(()) as transport:
            faults = try_hosts(partial(self._schedule_shutdown, transport, say), self.members)
        if reasons := "; ".join(str(fault) for fault in faults if fault):
            raise LeaseError(f"it is not certain that all instances terminate when their lease ends ({reasons})")

    def _schedule_shutdown(self, transport: Transport, say: Callable[[str], None], member: Member) -> str:
        """Schedule the shutdown of an instance unless it is scheduled; return why the instance would run on, or ""."""

        def read_timer() -> Timer:
            return parse_timer(transport.run(Host(member.address), ("sh", "-c", CHECK_TIMER)).output)

        timer = read_timer()
        if not (fault := timer.find_fault(self._limit)):
            return ""
        say(f"{member.address}: schedule the shutdown at the end of the lease, because {fault}")
        # If a running job has extended the lease within its limit, that end stays.
        until = timer.until if self._until <= timer.until <= self._limit else self._until
        answer = transport.run(Host(member.address), make_schedule_command(until, self._limit))
        if not (fault := read_timer().find_fault(self._limit)):
            return ""
        said = " ".join(answer.errors.split())[-300:] or "no message"
        return f"{member.address}: {fault}, after scheduling it ended with exit code {answer.exit_code} ({said})"

    def connect(
        self, find_key: Callable[[str], str], seconds: float, now: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        """Find unknown host keys by `find_key` of instances' ids ("": none yet), and log in to all instances.

        Attempts are made every 2 s for `seconds`, at least one. Raises CpuftError after that time, or at once if an
        instance shows another host key or AWS refuses to tell a key.
        """
        end = now() + seconds
        while errors := self._try_connections(find_key):
            wrong = [one for one in errors if isinstance(one, HostError) and one.kind in (KEY_CHANGED, KEY_UNKNOWN)]
            if wrong or now() >= end:
                advice = f"The instances cost money: remove them with `cpuft provision down {self.name}`"
                raise CpuftError(f"{'; '.join(map(str, wrong or errors))}. {advice}")
            sleep(_POLL_SECONDS)

    def _try_connections(self, find_key: Callable[[str], str]) -> list[CpuftError]:
        """Return why instances cannot be logged in to. No connection is made before all host keys are known."""
        try:
            missing = self._find_keys(find_key)
        except CallError as error:
            if not error.is_transient:
                raise
            return [error]
        if missing:
            return [
                CpuftError(
                    f"no ed25519 host key is on the console of {', '.join(missing)}: run the same command again to "
                    "wait longer, because types older than the Nitro system show their console up to 20 minutes after "
                    "their start; an AMI without cloud-init shows none"
                )
            ]
        with self._temporary_transport(()) as transport:
            answers = try_hosts(lambda one: transport.run(Host(one.address), ("true",)), self.members)
        return [one for one in answers if isinstance(one, CpuftError)]

    def _find_keys(self, find_key: Callable[[str], str]) -> list[str]:
        """Look for the host keys that are unknown; return the instances whose keys still are: "10.0.0.1 (i-1)"."""
        for one in self.members:
            if one.known_name not in self.keys and (key := find_key(one.mark)):
                self.keys[one.known_name] = key
        return [f"{one.address} ({one.mark})" for one in self.members if one.known_name not in self.keys]
