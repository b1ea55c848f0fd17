"""`cpuft launch --resume RUN`: what of the launch is the run's own, and whether there is anything to go on with."""

from __future__ import annotations

import fcntl
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cpuft.config import FREE_ON_RESUME, LaunchConfig, TrainConfig, option_names
from cpuft.errors import CpuftError
from cpuft.hosts.cluster import WORK_ROOT, find_access, read_hosts
from cpuft.hosts.hostfile import Host
from cpuft.launch.kept import Kept, gather_kept
from cpuft.rank.measured import Measured, list_measured
from cpuft.record import FILE_NAME, parse_record, read_record
from cpuft.serialization import load


@dataclass(frozen=True)
class Resumed:
    """A run that broke off."""

    run_dir: str
    train: TrainConfig = TrainConfig()
    """Its options, as recorded."""
    np: int = 0
    """Its ranks; 0 where nothing recorded them."""
    updates: int = 0
    """Recorded until it broke off."""
    global_batch: int = 0
    kept: tuple[Kept, ...] = ()
    """What hosts with disks of their own have of it, those that answer."""
    silent: tuple[str, ...] = ()
    """Why other hosts do not."""
    since: float = 0.0
    """When it broke off, in seconds since 1970, if it goes on by itself."""
    because: str = ""
    """And why."""
    fetched: str = ""
    """Host whose logs of it are here."""
    finished_on: str = ""
    """Host on which the run came to its end and where its results still are; empty for none."""
    measured: Measured | None = field(default=None, compare=False)
    places: frozenset[str] = field(default=frozenset(), compare=False)
    """Names of the hosts that it has run on, as they call themselves: between these `measured` holds."""

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Hosts that answer, in the order of the hostfile."""
        return tuple(one.host for one in self.kept)

    def take_over(
        self, config: LaunchConfig, train: TrainConfig, given: Collection[str]
    ) -> tuple[LaunchConfig, TrainConfig]:
        """The options of the run, with those of now that may differ; `given` names those that are not defaults.

        Raises
        ------
        CpuftError: an option was given with another value than the run has.
        """
        if config.run_dir:
            raise CpuftError("--resume and --run-dir both name the folder of the run: leave --run-dir out")
        # Where a file or folder was sent to, nobody can be expected to know.
        sent = [name for name, value in vars(self.train).items() if str(value).startswith(f"{WORK_ROOT}/cpuft-")]
        free = {*FREE_ON_RESUME, *sent}
        for name in (name for name in option_names(TrainConfig) if name in given):
            was, now = getattr(self.train, name), getattr(train, name)
            if was != now and name not in free:
                flag = "--" + name.replace("_", "-")
                raise CpuftError(f"{self.run_dir} was started with {flag} {was}, not {now}: leave {flag} out")
        config = config if "np" in given or not self.np else replace(config, np=self.np)
        return config, replace(self.train, **{name: getattr(train, name) for name in free if name in given})


def gather_resumed(run: str, config: LaunchConfig, is_script: bool = False) -> Resumed:
    """What is known of a run to go on with, here and on the hosts that `config` names.

    Raises CpuftError: as `read_resumed`.
    """
    hosts, access = read_hosts(config), find_access(config)
    if all(access.transport.is_here(host) for host in hosts):
        return read_resumed(run, is_script)
    kept, silent = gather_kept(hosts, access, str(Path(run).absolute()))
    return replace(read_resumed(run, is_script, kept), kept=kept, silent=tuple(map(str, silent)))


def read_resumed(run: str, is_script: bool = False, kept: Sequence[Kept] = ()) -> Resumed:
    """What is known of a run to go on with: of a script's, only where it is. `kept`: what hosts have of it.

    Raises
    ------
    CpuftError: no run of ours is there, it came to its end, it is still going on, or its ranks trained apart.
    """
    path = Path(run).absolute()
    going = [one.host.name for one in kept if one.going]
    if finished := [one.host.name for one in kept if one.finished and not one.going]:
        return Resumed(str(path), finished_on=finished[0])
    headers = [(one.host.name, one.header) for one in kept if one.header]
    here = (path / FILE_NAME).exists()
    if is_script and ((path / "logs").is_dir() or any(one.there for one in kept)) and not (here or headers or going):
        return Resumed(str(path))
    if here or not headers:
        record = read_record(str(path))
    else:
        record = parse_record(headers[0][1], f"the record of {run} on {headers[0][0]}")
    if is_script:
        raise CpuftError(f"run {run} is cpuft's own training, and no script's: leave the script out")
    if record.footer:
        raise CpuftError(f"run {run} is finished, and there is nothing to resume: start a new one without --resume")
    if record.header.apart:
        raise CpuftError(f"run {run} measured ranks that train apart, and cannot go on: start it anew")
    if going or (here and _is_locked(path / FILE_NAME)):
        raise CpuftError(f"run {run} is still going on: wait for its end, or stop it first")
    header = record.header
    try:
        options = {name: value for name, value in header.options.items() if name in option_names(TrainConfig)}
        train = load(TrainConfig, options, "the record")
    except ValueError as error:
        raise CpuftError(f"run {run} cannot go on, because {error}: start it anew") from None
    updates = max([len(record.steps), *(max(one.steps, one.update) for one in kept)])
    known = Resumed(str(path), train, header.world_size, updates, header.global_batch)
    ranks = header.ranks + [rank for line in record.resumptions for rank in line.ranks]
    return replace(known, measured=list_measured(header), places=frozenset(rank.host for rank in ranks))


def _is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
