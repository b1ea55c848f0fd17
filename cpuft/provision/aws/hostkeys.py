"""Host keys of rented hosts: one that all were given at birth, then one that each has made for itself. Pure.

The given one was in user data, which whoever may describe instances reads. The two are of different types, so that ssh
and paramiko can know a host by both while it changes: a launcher that is killed in between leaves a host known by the
key that it shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from cpuft.hosts.ssh_files import Member
from cpuft.plan import Step
from cpuft.provision.servers import ServerFacts

_SCRIPT = Path(__file__).with_name("hostkey.sh").read_text(encoding="utf-8")
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
