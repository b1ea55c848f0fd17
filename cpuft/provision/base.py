"""What every kind of cluster can do (`Provider`), and the table of all kinds (`PROVIDERS`).

A new kind of cluster needs a subclass of `Provider`, a line of the table, and a module with its options, which must not
import anything heavy because every help of `cpuft provision` imports it.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from cpuft import execute
from cpuft.config.fields import format_flag, parse_arguments
from cpuft.errors import CpuftError
from cpuft.files import hash_text
from cpuft.hosts import registry
from cpuft.hosts.registry import Entry
from cpuft.plans import Plan
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.cluster_files import check_places
from cpuft.provision.options import HostsConfig, LocalConfig
from cpuft.transfer import open_locked

Say = Callable[[str], None]
"""Prints a line of text for the user."""
Ask = Callable[[str], bool]
"""Asks the user a yes-or-no question. Returns False when nobody is there to answer."""


C = TypeVar("C", bound=Any)
"""The options of a kind of cluster: a frozen dataclass with a `name`, whose fields are made by `option`."""
F = TypeVar("F")
_STAGE_SECONDS = 3600.0
"""Time limit of a stage; copying a gigabyte of wheels over a slow link takes long."""


class Provider(ABC, Generic[C, F]):
    """One cluster of one kind: makes it, describes it and removes it.

    A subclass says what exists (`gather`), what is missing (`plan`) and what has to be removed (`plan_down`). The
    methods that commands call (`make`, `show`, `describe`, `drift`, `down`, `show_down`) are built from these. They
    keep two promises:

    - Calling `make` or `down` again is always safe: it continues where the last call stopped, and does nothing when
      nothing is left to do.
    - A process that is killed in the middle never loses track of what it made: whatever records a resource is created
      before the resource and removed after it.

    CPUFT_STATE, XDG_STATE_HOME or HOME in `environ` says where clusters are recorded; `entry` is this cluster's
    record, if it has one. Raises CpuftError when the name is not valid, or the registry's folder has white space in its
    path or can be written by other users.
    """

    kind: str
    """The key in `PROVIDERS`, which the cluster's record repeats."""
    summary: str
    """What the cluster consists of, for messages: "4 x m7i.8xlarge"."""

    def __init__(self, config: C, environ: Mapping[str, str], entry: Entry | None = None) -> None:
        self.name = registry.check_name(entry.name if entry else config.name)
        self.config: C = config
        self.environ = environ
        self.root = registry.state_root(environ)
        self.directory = self.root / self.name
        self.hostfile = entry.hostfile if entry else Path(registry.HOSTFILES, self.name).absolute().as_posix()

    @classmethod
    def from_entry(cls, entry: Entry, environ: Mapping[str, str]) -> Provider[C, F]:
        """Return the provider of a recorded cluster; CpuftError if its recorded options are unknown or not valid."""
        argv = [f"{format_flag(key)}={value}" for key, value in entry.options.items()]
        return cls(parse_arguments(PROVIDERS[cls.kind].options, argv), environ, entry)

    @abstractmethod
    def gather(self) -> F:
        """Return the facts from which `plan` decides what is missing. Changes nothing anywhere.

        Raises CpuftError when the cluster can never become what was asked for, or cannot be asked.
        """

    @abstractmethod
    def plan(self, facts: F) -> Plan:
        """Return the steps that make or repair the cluster; an empty plan when nothing is missing. Pure.

        A plan may hold the first steps only, because `make` gathers and plans again after each plan. Raises CpuftError
        when the missing parts cannot be made.
        """

    @abstractmethod
    def plan_down(self, facts: F) -> Plan:
        """Return the steps that remove the cluster; an empty plan when nothing is left. The record goes last. Pure.

        Raises CpuftError when the cluster must not be removed from here.
        """

    @abstractmethod
    def describe_hosts(self) -> list[str]:
        """Return a line for each host (what it is doing, or why it cannot be asked); clouds add one on the lease."""

    def gather_remains(self) -> F:
        """Return the facts from which `plan_down` decides what to remove: by default the same as for `plan`."""
        return self.gather()

    def run(self, plan: Plan, say: Say) -> None:
        """Execute a plan (a kind may override this). Raises CpuftError: a step fails, or a stage exceeds an hour."""
        run_plan(plan, say)

    def check(self) -> None:
        """Check what can be checked before anything is gathered.

        Raises CpuftError when a cluster of another kind is recorded by this name, or when the cluster's folder or
        hostfile was not written by cpuft or can be written by other users.
        """
        if self.directory.exists():
            registry.refuse_untrusted(self.directory)
        entry = self.find_record()
        if entry and entry.kind != self.kind:
            raise CpuftError(
                f"{self.name} is a cluster of kind {entry.kind} already: choose another --name, or cpuft provision "
                f"down {self.name}"
            )
        check_places(self.directory.as_posix(), self.hostfile)

    def find_record(self) -> Entry | None:
        """Return the record of this name, perhaps of another kind or region; None without a readable one."""
        with suppress(CpuftError):
            return registry.read_entry_if_exists(self.root, self.name)
        return None

    def confirm(self, ask: Ask) -> None:
        """Ask the user what only the user can decide, such as a price (default: nothing); CpuftError after a no."""

    def make(self, say: Say, ask: Ask) -> str:
        """Make or repair the cluster; return "cluster NAME: SUMMARY, hostfile PATH; next: cpuft doctor ...".

        Raises CpuftError when a check fails, the user refuses, a step fails, or another process has been changing the
        same cluster for 30 s.
        """
        self.check()
        registry.make_state_root(self.root)
        with lock(self.directory):
            self.confirm(ask)
            reconcile(self.gather, self.plan, say, self.run)
        hostfile = self._display_hostfile()
        return f"cluster {self.name}: {self.summary}, hostfile {hostfile}; next: cpuft doctor --cluster {self.name}"

    def show(self) -> Plan:
        """Return the first plan that `make` would execute after a yes to all questions. Changes nothing anywhere.
        Raises CpuftError: a check fails, or the cluster cannot be examined.
        """
        self.check()
        self.confirm(lambda question: True)
        return self.plan(self.gather())

    def describe(self) -> str:
        """Return the lines of `cpuft provision status`, each ended by a newline: the cluster, then its hosts, indented.

        Raises CpuftError when the cloud or this machine cannot be asked; a host that does not answer only has a line
        that says so.
        """
        head = f"cluster {self.name} ({self.kind}), hostfile {self._display_hostfile()}\n"
        return head + "".join(f"  {line}\n" for line in self.describe_hosts())

    def drift(self) -> list[str]:
        """Return a line `HOST: REASON` for each step of the first plan of `make`; [] when nothing is missing.

        HOST is "here" for a step on this machine that is not for a simulated host. Changes nothing anywhere. Raises
        CpuftError when the cluster cannot be asked, or cannot become what was asked for.
        """
        steps = [step for stage in self.plan(self.gather()).stages for step in stage]
        # A step on this machine for a simulated host names that host in its first environment setting.
        names = [step.host or "".join(one.value for one in step.settings[:1]) or "here" for step in steps]
        return [f"{name}: {step.why}" for name, step in zip(names, steps)]

    def down(self, say: Say) -> str:
        """Remove the cluster and its record, and return "cluster NAME was removed", also if nothing was there.

        Raises CpuftError when the cluster cannot be examined or must not be removed from here, a step fails, or another
        process has been changing the same cluster for 30 s.
        """
        with lock(self.directory):
            reconcile(self.gather_remains, self.plan_down, say, self.run)
        return f"cluster {self.name} was removed"

    def show_down(self) -> Plan:
        """Return the first plan of `down`. CpuftError: the cluster cannot be examined, or not be removed from here."""
        return self.plan_down(self.gather_remains())

    def _display_hostfile(self) -> str:
        relative = os.path.relpath(self.hostfile)
        return self.hostfile if relative.startswith("..") else relative


def reconcile(
    gather: Callable[[], F], plan: Callable[[F], Plan], say: Say, run: Callable[[Plan, Say], None] | None = None
) -> F:
    """Gather facts, plan and execute (by default `run_plan`) until a plan has no steps; return the last facts.

    Raises CpuftError when a step fails, or when the same plan comes twice in a row: its steps changed nothing.
    """
    before: Plan | None = None
    while True:
        facts = gather()
        missing = plan(facts)
        if not missing.stages:
            return facts
        if missing == before:
            steps = "; ".join(step.why for stage in missing.stages for step in stage)
            raise CpuftError(f"these steps have changed nothing ({steps}): see with --dry-run what they do")
        (run or run_plan)(missing, say)
        before = missing


def run_plan(plan: Plan, say: Say) -> None:
    """Execute a plan's stages in order and `say` the progress. CpuftError: a step fails, or a stage exceeds an hour."""
    execute.run_stages(plan, _STAGE_SECONDS, say, "correct the cause and run the same command again")


@contextmanager
def lock(path: Path, seconds: float = 30.0) -> Iterator[None]:
    """Hold the lock of the cluster at `path`, which need not exist: only one `cpuft provision` at a time changes it.

    The lock, of a file for temporary files, is released when the process ends in any way. Raises CpuftError when
    another process holds the lock for more than `seconds`.
    """
    from tempfile import gettempdir  # slow, and few commands need it

    try:
        held = open_locked(f"{gettempdir()}/cpuft-provision-{hash_text(os.path.realpath(path), 32)}", seconds)
    except BlockingIOError:
        text = f"another cpuft provision has been changing {path.name} for {seconds:.0f} s"
        raise CpuftError(f"{text}: wait until it ends") from None
    try:
        yield
    finally:
        os.close(held)


@dataclass(frozen=True)
class Kind:
    """A kind of cluster."""

    provider: str
    """Its subclass of `Provider` as "module:class", imported when it is needed."""
    options: type[Any]
    """The dataclass of its options, which `cpuft provision KIND` has; its docstring is the help."""


PROVIDERS = {
    "local": Kind("cpuft.provision.simulated:SimulatedCluster", LocalConfig),
    "hosts": Kind("cpuft.provision.servers:Servers", HostsConfig),
    "aws": Kind("cpuft.provision.aws.provider:Aws", AwsConfig),
}


def load_provider(kind: str) -> type[Provider[Any, Any]]:
    """Import and return the provider class of a kind. Raises KeyError for an unknown kind."""
    module, _, name = PROVIDERS[kind].provider.partition(":")
    return cast("type[Provider[Any, Any]]", getattr(importlib.import_module(module), name))


def load_cluster(name: str, environ: Mapping[str, str]) -> Provider[Any, Any]:
    """Return the recorded cluster `name`, without asking its hosts.

    Raises CpuftError when there is no record, or it is damaged, writable by other users, of an unknown kind, or of a
    cluster that was made on another machine.
    """
    entry = registry.read_entry(registry.state_root(environ), name)
    if entry.kind == registry.INSIDE:
        raise CpuftError(f"this host is in cluster {name}, made on another machine: run the command there")
    if entry.kind not in PROVIDERS:
        raise CpuftError(
            f"cluster {name} is of the unknown kind {entry.kind!r:.60}: use the version of cpuft that made it"
        )
    return load_provider(entry.kind).from_entry(entry, environ)


def find_cluster(name: str, environ: Mapping[str, str], region: str = "") -> Provider[Any, Any]:
    """Return the recorded cluster `name`, or one that may exist without a record.

    With a `region` other than that of a record, that is the cluster of this name in this region of AWS, even if nothing
    is there. Raises CpuftError: there is none, or its record is damaged or of another machine.
    """
    entry = registry.read_entry_if_exists(registry.state_root(environ), name)
    if region and not (entry and entry.options.get("region") == region):
        return load_provider("aws")(AwsConfig(name=name, region=region), environ)
    return load_cluster(name, environ)
