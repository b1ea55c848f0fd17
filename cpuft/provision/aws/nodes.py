"""The instances of a cluster as servers over ssh: their environment, their lease and their host keys.

RunInstances gives all instances of a call the same user data, and so the same host key, which this machine has made.
The first connection to each instance is strict with that key. Then each instance makes a host key of its own and
deletes the shared one. ssh accepts both keys while that happens, so a process that is killed in between can still
connect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.hosts.hostfile import Host
from cpuft.hosts.ssh_config import Member
from cpuft.hosts.transport import KEY_CHANGED, KEY_UNKNOWN, HostError, Transport, map_hosts, try_hosts
from cpuft.plan import Plan, Step
from cpuft.provision.aws.facts import Instance, SecurityGroup
from cpuft.provision.aws.lease import CHECK_TIMER, RENEW_COMMAND, Timer, make_schedule_command, parse_timer
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.aws.plan import find_notice_url, list_options
from cpuft.provision.cluster_files import read_raw
from cpuft.provision.options import HostsConfig
from cpuft.provision.servers import ClusterFacts, ServerFacts, Servers

_HOST_KEY_SCRIPT = Path(__file__).with_name("host_key.sh").read_text(encoding="utf-8")
_OWN_COMMENT = "cpuft-own"
"""Comment of a host key that an instance has made itself."""
_FOLDER, _PIDFILE = "/etc/ssh", "/run/sshd.pid"
_POLL_SECONDS = 2.0


class LeaseError(CpuftError):
    """Instances do not terminate themselves when their lease ends, and cannot be made to."""


def find_known_keys(known_hosts: str, member: Member) -> str:
    """Return the keys that a known_hosts file has for an instance, one per line as "type base64"; "" if it has none.

    A line counts if its name is `member.known_name` and its comment is `member.mark`, the id of the instance. So keys
    of another instance that had the same address before are left out. Other lines are ignored, and nothing is raised.

    Parameters
    ----------
    known_hosts
        The text of the file, not its path.
    """
    lines = [line.split() for line in known_hosts.splitlines()]
    return "\n".join(
        " ".join(words[1:3]) for words in lines if words[:1] == [member.known_name] and words[3:] == [member.mark]
    )


def choose_keys(shared: str, host_keys: Iterable[str]) -> str:
    """Return the keys by which an instance may be recognized, one per line as "type base64".

    The shared key comes first, if the instance still has it or has no key of its own; then the keys of its own, which
    are those with the comment "cpuft-own".

    Parameters
    ----------
    shared
        The key that all instances got at first, as "type base64".
    host_keys
        The public keys in /etc/ssh of the instance, as "type base64 comment".
    """
    keys = [key.split() for key in host_keys]
    own = [" ".join(words[:2]) for words in keys if words[2:] == [_OWN_COMMENT]]
    has_shared = any(" ".join(words[:2]) == shared for words in keys)
    return "\n".join([*([shared] if has_shared or not own else []), *own])


def plan_rotation(servers: Sequence[tuple[Member, ServerFacts]], shared: str) -> tuple[Step, ...]:
    """Return the next step of each instance that still has the shared host key; () if none has.

    First the instance makes a key of its own. Once it has one, the next step deletes the shared key, so the caller must
    write both keys into the known_hosts files of this machine and of all other instances between these two steps.

    Parameters
    ----------
    servers
        (ssh data, survey) of each instance.
    shared
        The shared key, as "type base64".
    """
    steps = []
    for member, own in servers:
        keys = choose_keys(shared, own.host_keys).splitlines()
        if shared in {" ".join(key.split()[:2]) for key in own.host_keys}:
            verb = "make" if keys == [shared] else "forget"
            why = "make a host key for this host" if verb == "make" else "delete the host key that all hosts share"
            command = ("sh", "-c", _HOST_KEY_SCRIPT, "host_key", verb, _OWN_COMMENT, _FOLDER, _PIDFILE)
            steps.append(Step(why, command, host=member.address))
    return tuple(steps)


class Nodes(Servers):
    """The instances as servers. They know each other by private addresses; this machine uses their public ones.

    Parameters
    ----------
    instances
        The instances that are used, the head host first.
    group
        The security group, which says when the lease ends. Without it, no shutdown is scheduled or checked.

    Raises CpuftError without instances, or if the prefix or the name of the cluster cannot be used.
    """

    kind = "aws"
    here = ""  # an instance in another network may have the address of this machine

    def __init__(
        self,
        config: AwsConfig,
        instances: tuple[Instance, ...],
        environ: Mapping[str, str],
        hostfile: str,
        group: SecurityGroup | None = None,
    ) -> None:
        hosts = ",".join(one.private for one in instances)
        servers_config = HostsConfig(hosts, config.name, "root", prefix=config.prefix, wheels=config.wheels)
        super().__init__(servers_config, environ)
        self.hostfile = hostfile
        self.config = replace(self.config, key=str(self.directory / "id_ed25519"))
        self.members = tuple(
            Member(one.private, one.private, "root", reached=one.public, mark=one.id) for one in instances
        )
        self._shared_key = " ".join(read_raw(self.directory / "host_key.pub").split()[:2])
        known_hosts = read_raw(self.directory / "known_hosts")
        self.keys = {one.known_name: find_known_keys(known_hosts, one) or self._shared_key for one in self.members}
        self._aws_config = config
        self._until = group.until if group else 0
        self._limit = max(group.until, group.limit) if group else 0
        self._timers: dict[str, Timer] = {}
        """What each instance said last about its lease, by private address."""

    def _examine(self, transport: Transport) -> ClusterFacts:
        facts = super()._examine(transport)
        self._read_timers(transport)
        servers = tuple(
            (replace(member, key=choose_keys(self._shared_key, own.host_keys)), own) for member, own in facts.servers
        )
        facts = replace(facts, servers=servers, kind=self.kind, options=list_options(self._aws_config))
        facts = replace(facts, until=self._until, renewal=RENEW_COMMAND, can_lose_head=True)
        return replace(facts, notice=find_notice_url(self._aws_config))

    def plan(self, facts: ClusterFacts) -> Plan:
        """Plan shutdowns that are not scheduled, and what is missing; if that is nothing, the rotation of host keys.

        Raises CpuftError if an instance cannot be provisioned, such as without Python 3.10 or without disk space.
        """
        plan = super().plan(facts)
        rotation = () if plan.stages else plan_rotation(facts.servers, self._shared_key)
        stages = (self._plan_shutdowns(), rotation, *plan.stages)
        return replace(plan, stages=tuple(stage for stage in stages if stage))

    def _read_timers(self, transport: Transport) -> None:
        def read(member: Member) -> Timer:
            return parse_timer(transport.run(Host(member.address), ("sh", "-c", CHECK_TIMER)).output)

        if self._limit:
            self._timers = dict(zip([member.address for member in self.members], map_hosts(read, self.members)))

    def _find_faults(self) -> dict[str, str]:
        """Return why instances would not terminate themselves when their lease ends, by address."""
        faults = {address: timer.find_fault(self._limit) for address, timer in self._timers.items()}
        return {address: fault for address, fault in faults.items() if fault}

    def _plan_shutdowns(self) -> tuple[Step, ...]:
        steps = []
        for address, fault in self._find_faults().items():
            # If a running job has extended the lease within its limit, that end stays.
            known = self._timers[address].until
            until = known if self._until <= known <= self._limit else self._until
            command = make_schedule_command(until, self._limit)
            steps.append(Step(f"schedule the shutdown at the end of the lease, because {fault}", command, host=address))
        return tuple(steps)

    def secure_lease(self, say: Callable[[str], None]) -> None:
        """Verify over ssh that all instances terminate themselves when their lease ends.

        Shutdowns that are missing or too late are scheduled. `say` is called with a line for each shutdown that is
        scheduled. Nothing is done without a security group.

        Raises LeaseError if a shutdown cannot be scheduled, or if instances still would not terminate themselves
        afterwards, or cannot be asked (the message names each of them).
        """
        with self._temporary_transport(()) as transport:
            try:
                self._read_timers(transport)
                for step in self._plan_shutdowns():
                    say(f"{step.host}: {step.why}")
                    answer = transport.run(Host(step.host), step.command)
                    if answer.exit_code:
                        errors = " ".join(answer.errors.split())[-300:] or "without a message"
                        raise LeaseError(
                            f"the shutdown of {step.host} at the end of its lease could not be scheduled ({errors})"
                        )
                self._read_timers(transport)
            except LeaseError:
                raise
            except CpuftError as error:
                raise LeaseError(
                    f"it is not known whether all instances terminate themselves when their lease ends: {error}"
                ) from None
            if faults := self._find_faults():
                reasons = ", ".join(f"{address}: {fault}" for address, fault in faults.items())
                raise LeaseError(f"instances would not terminate themselves when their lease ends ({reasons})")

    def wait(self, seconds: float, now: Callable[[], float], sleep: Callable[[float], None]) -> None:
        """Wait until all instances accept ssh connections. They are asked every 2 s; at least once.

        Parameters
        ----------
        seconds
            Time limit.
        now, sleep
            Return the present time in seconds, and pause for a number of seconds.

        Raises CpuftError when some do not within `seconds`, or at once when one shows an unexpected host key.
        """
        end = now() + seconds
        with self._temporary_transport(()) as transport:
            while True:
                answers = try_hosts(lambda one: transport.run(Host(one.address), ("true",)), self.members)
                errors = [one for one in answers if isinstance(one, CpuftError)]
                if not errors:
                    return
                key_errors = [
                    one for one in errors if isinstance(one, HostError) and one.kind in (KEY_CHANGED, KEY_UNKNOWN)
                ]
                if key_errors or now() > end:
                    reasons = "; ".join(str(one) for one in key_errors or errors)
                    raise CpuftError(
                        f"{reasons}. The instances cost money: remove them with `cpuft provision down {self.name}`"
                    )
                sleep(_POLL_SECONDS)
