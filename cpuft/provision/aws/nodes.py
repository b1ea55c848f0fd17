"""The instances of a rented cluster as servers over ssh: the same steps as for servers that are there anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.hosts.hostfile import Host
from cpuft.hosts.ssh_files import Member
from cpuft.hosts.transport import KEY_CHANGED, KEY_UNKNOWN, HostError, Transport, attempt, side_by_side
from cpuft.plan import Plan, Step
from cpuft.provision.aws.facts import Group, Instance
from cpuft.provision.aws.lease import CHECK_TIMER, RENEWAL, Timer, make_arming, parse_timer
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.aws.plan import find_notice, remember
from cpuft.provision.cluster_files import read_raw
from cpuft.provision.options import HostsConfig
from cpuft.provision.servers import Facts, ServerFacts, Servers

_SCRIPT = Path(__file__).with_name("host_key.sh").read_text(encoding="utf-8")
_MARK = "cpuft-own"
"""The comment of a key that a host has made for itself."""
_FOLDER, _PIDFILE = "/etc/ssh", "/run/sshd.pid"


def known_keys(text: str, member: Member) -> str:
    """What a known_hosts file tells of this very machine: of another one that had its address before, nothing."""
    lines = [line.split() for line in text.splitlines()]
    return "\n".join(
        " ".join(words[1:3]) for words in lines if words[:1] == [member.known_name] and words[3:] == [member.mark]
    )


def choose_keys(given: str, there: Iterable[str]) -> str:
    """The keys by which a host may be known that has these in /etc/ssh; `given` is "type base64"."""
    keys = [key.split() for key in there]
    own = [" ".join(words[:2]) for words in keys if words[2:] == [_MARK]]
    has_given = any(" ".join(words[:2]) == given for words in keys)
    return "\n".join([*([given] if has_given or not own else []), *own])


def plan_rotation(servers: Sequence[tuple[Member, ServerFacts]], given: str) -> tuple[Step, ...]:
    """What is next, for hosts that have the given key in /etc/ssh: a key of their own, then that they forget it.

    Between these all have learnt the new one: whoever plans this has nothing else to do any more.
    """
    steps = []
    for member, own in servers:
        keys = choose_keys(given, own.host_keys).splitlines()
        if given in {" ".join(key.split()[:2]) for key in own.host_keys}:
            verb = "make" if keys == [given] else "forget"
            why = "make the host a key of its own" if verb == "make" else "forget the key that all hosts were given"
            words = ("sh", "-c", _SCRIPT, "hostkey", verb, _MARK, _FOLDER, _PIDFILE)
            steps.append(Step(why, words, host=member.address))
    return tuple(steps)


_LOOK_AGAIN_SECONDS = 2.0


class LeaseError(CpuftError):
    """Instances do not end themselves when their lease ends, and cannot be made to."""


class Nodes(Servers):
    """Known to each other by private addresses, and reached from here by public ones.

    All show the host key that they were given at birth, so that the first connection is strict already; then each makes
    one of its own.
    """

    kind = "aws"
    elsewhere = True

    def __init__(
        self,
        config: AwsConfig,
        instances: tuple[Instance, ...],
        environ: Mapping[str, str],
        hostfile: str,
        group: Group | None = None,
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
        self._until = group.until if group else 0
        self._limit = max(group.until, group.limit) if group else 0
        self._timers: dict[str, Timer] = {}
        """Of each instance, by its private address, as it was seen last."""

    def _look(self, transport: Transport) -> Facts:
        facts = super()._look(transport)
        self._read_timers(transport)
        servers = tuple(
            (replace(member, key=choose_keys(self._given, own.host_keys)), own) for member, own in facts.servers
        )
        facts = replace(facts, servers=servers, kind=self.kind, options=remember(self._asked))
        facts = replace(facts, until=self._until)
        return replace(facts, notice=find_notice(self._asked), renewal=RENEWAL, may_lose_master=True)

    def plan(self, facts: Facts) -> Plan:
        """The end of the lease, where it is not armed; what is missing; then the next step of the hosts' own keys."""
        plan = super().plan(facts)
        steps = () if plan.stages else plan_rotation(facts.servers, self._given)
        stages = (self._plan_arming(), steps or (), *plan.stages)
        return replace(plan, stages=tuple(stage for stage in stages if stage))

    def _read_timers(self, transport: Transport) -> None:
        def read(member: Member) -> Timer:
            return parse_timer(transport.run(Host(member.address), ("sh", "-c", CHECK_TIMER)).output)

        if self._limit:
            self._timers = dict(zip([member.address for member in self.members], side_by_side(read, self.members)))

    def _find_unarmed(self) -> dict[str, str]:
        """Why instances do not end themselves with their lease, by their addresses."""
        faults = {address: timer.find_fault(self._limit) for address, timer in self._timers.items()}
        return {address: fault for address, fault in faults.items() if fault}

    def _plan_arming(self) -> tuple[Step, ...]:
        steps = []
        for address, fault in self._find_unarmed().items():
            # What jobs have moved the end to stays, as far as they may.
            known = self._timers[address].until
            until = known if self._until <= known <= self._limit else self._until
            words = make_arming(until, self._limit)
            steps.append(Step(f"arm the end of the lease, because {fault}", words, host=address))
        return tuple(steps)

    def secure_lease(self, say: Callable[[str], None]) -> None:
        """Verify that all instances end themselves when their lease ends, and make those do so that do not.

        Raises LeaseError: naming each that still does not.
        """
        with self._door(()) as transport:
            try:
                self._read_timers(transport)
                for step in self._plan_arming():
                    say(f"{step.host}: {step.why}")
                    answer = transport.run(Host(step.host), step.command)
                    if answer.exit_code:
                        said = " ".join(answer.errors.split())[-300:] or "it said nothing"
                        raise LeaseError(f"{step.host} does not end itself when its lease ends ({said})")
                self._read_timers(transport)
            except HostError as error:
                raise LeaseError(f"whether {error.host} ends itself when its lease ends is unknown: {error}") from None
            if unarmed := self._find_unarmed():
                told = ", ".join(f"{address}: {fault}" for address, fault in unarmed.items())
                raise LeaseError(f"instances do not end themselves when their lease ends ({told})")

    def wait(self, seconds: float, now: Callable[[], float], sleep: Callable[[float], None]) -> None:
        """Until all let us in. Raises CpuftError: some do not in time, or one shows a key that is not the given one."""
        end = now() + seconds
        with self._door(()) as transport:
            while True:
                answers = attempt(lambda one: transport.run(Host(one.address), ("true",)), self.members)
                troubles = [one for one in answers if isinstance(one, CpuftError)]
                if not troubles:
                    return
                strange = [one for one in troubles if isinstance(one, HostError) and one.kind in _STRANGE]
                if strange or now() > end:
                    told = "; ".join(str(one) for one in strange or troubles)
                    raise CpuftError(f"{told}; they cost money: cpuft provision down {self.name}")
                sleep(_LOOK_AGAIN_SECONDS)


_STRANGE = (KEY_CHANGED, KEY_UNKNOWN)
