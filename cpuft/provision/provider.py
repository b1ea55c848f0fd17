"""What `cpuft provision` asks of a kind of cluster. All of it is one loop: gather facts, plan, execute, look again."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from cpuft.config import parse_arguments
from cpuft.hosts.registry import (
    HOSTFILES,
    Entry,
    check_name,
    make_state_root,
    refuse_other_kind,
    refuse_untrusted,
    state_root,
)
from cpuft.plan import Plan
from cpuft.provision.options import AwsConfig, HostsConfig, LocalConfig
from cpuft.provision.ownership import check_places
from cpuft.provision.reconcile import Say, lock, reconcile, run_stages

C = TypeVar("C", LocalConfig, HostsConfig, AwsConfig)
F = TypeVar("F")
Ask = Callable[[str], bool]


class Provider(ABC, Generic[C, F]):
    """One cluster, as it is asked for, or remembered by its entry.

    A kind of cluster says what is there, what is missing and what is left to take away; the rest is the same for all.
    """

    kind: str
    """One of `registry.KINDS`."""
    options: type[C]
    size: str
    """What it consists of, for a sentence."""

    def __init__(self, config: C, environ: Mapping[str, str], entry: Entry | None = None) -> None:
        self.name = check_name(entry.name if entry else config.name)
        self.config: C = config
        self.environ = environ
        self.root = state_root(environ)
        self.directory = self.root / self.name
        self.hostfile = entry.hostfile if entry else str(Path(HOSTFILES, self.name).absolute())

    @classmethod
    def recall(cls, entry: Entry, environ: Mapping[str, str]) -> Provider[C, F]:
        """The cluster as it was asked for when it was made. Raises CpuftError for what nobody can have asked for."""
        words = [f"--{key.replace('_', '-')}={value}" for key, value in entry.options.items()]
        return cls(parse_arguments(cls.options, words), environ, entry)

    @abstractmethod
    def gather(self) -> F:
        """What is there of the cluster. Looks only: nothing changes here or elsewhere."""

    @abstractmethod
    def plan(self, facts: F) -> Plan:
        """What is missing. Raises CpuftError when it cannot be had."""

    @abstractmethod
    def plan_down(self, facts: F) -> Plan:
        """What is to be taken away, what remembers it last."""

    @abstractmethod
    def describe_hosts(self) -> list[str]:
        """A line a host: what it is doing, or why it cannot be asked."""

    def gather_left(self) -> F:
        """What there is to be taken away."""
        return self.gather()

    def run(self, plan: Plan, say: Say) -> None:
        """Execute a plan. Raises CpuftError that names every step that failed."""
        run_stages(plan, say)

    def check(self) -> None:
        """Raises CpuftError when a cluster of this name cannot be made here."""
        if self.directory.exists():
            refuse_untrusted(self.directory)
        refuse_other_kind(self.root, self.name, self.kind)
        check_places(str(self.directory), self.hostfile)

    def learn(self, ask: Ask) -> None:
        """Ask what only the user can know, before anything is gathered. Raises CpuftError when the answer is no."""

    def make(self, say: Say, ask: Ask) -> str:
        """Make or repair the cluster; a sentence for the user."""
        self.check()
        make_state_root(self.root)
        with lock(self.directory):
            self.learn(ask)
            reconcile(self.gather, self.plan, say, self.run)
        return f"cluster {self.name}: {self.size} in {self._shown()}; next: cpuft doctor --cluster {self.name}"

    def show(self) -> Plan:
        """What `make` would do first, its questions answered by yes. Changes nothing, here or elsewhere."""
        self.check()
        self.learn(lambda question: True)
        return self.plan(self.gather())

    def describe(self) -> str:
        """What the cluster is, and what its hosts are doing now."""
        head = f"cluster {self.name} ({self.kind}), hostfile {self._shown()}\n"
        return head + "".join(f"  {line}\n" for line in self.describe_hosts())

    def drift(self) -> list[str]:
        """What a new `make` would do, a line each. Changes nothing."""
        steps = [step for stage in self.plan(self.gather()).stages for step in stage]
        # What is done here for a simulated host names it by its first setting.
        names = [step.host or "".join(one.value for one in step.settings[:1]) or "here" for step in steps]
        return [f"{name}: {step.why}" for name, step in zip(names, steps)]

    def down(self, say: Say) -> str:
        """Leave nothing of the cluster anywhere; a sentence for the user."""
        with lock(self.directory):
            reconcile(self.gather_left, self.plan_down, say, self.run)
        return f"cluster {self.name} is gone"

    def show_down(self) -> Plan:
        """What `down` would do. Changes nothing."""
        return self.plan_down(self.gather_left())

    def _shown(self) -> str:
        relative = os.path.relpath(self.hostfile)
        return self.hostfile if relative.startswith("..") else relative
