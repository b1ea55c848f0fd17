"""`cpuft launch --resume RUN`: what of the launch is the run's own, and whether there is anything to go on with."""

from __future__ import annotations

import fcntl
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.loader import load
from cpuft.options.fields import FREE_ON_RESUME, LaunchConfig, TrainConfig, option_names
from cpuft.record import FILE_NAME, read_record


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
        for name in (name for name in option_names(TrainConfig) if name in given):
            was, now = getattr(self.train, name), getattr(train, name)
            if was != now and name not in FREE_ON_RESUME:
                flag = "--" + name.replace("_", "-")
                raise CpuftError(f"{self.run_dir} was started with {flag} {was}, not {now}: leave {flag} out")
        config = config if "np" in given or not self.np else replace(config, np=self.np)
        return config, replace(self.train, **{name: getattr(train, name) for name in FREE_ON_RESUME if name in given})


def read_resumed(run: str, is_script: bool = False) -> Resumed:
    """What is known of a run to go on with: of a script's, only where it is.

    Raises
    ------
    CpuftError: no run of ours is there, it came to its end, it is still going on, or its ranks trained apart.
    """
    path = Path(run).absolute()
    if is_script and (path / "logs").is_dir() and not (path / FILE_NAME).exists():
        return Resumed(str(path))
    record = read_record(str(path))
    if is_script:
        raise CpuftError(f"run {run} is cpuft's own training, and no script's: leave the script out")
    if record.footer:
        raise CpuftError(f"run {run} is finished, and there is nothing to resume: start a new one without --resume")
    if record.header.apart:
        raise CpuftError(f"run {run} measured ranks that train apart, and cannot go on: start it anew")
    with (path / FILE_NAME).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CpuftError(f"run {run} is still going on: wait for its end, or stop it first") from None
    header = record.header
    try:
        options = {name: value for name, value in header.options.items() if name in option_names(TrainConfig)}
        train = load(TrainConfig, options, "the record")
    except ValueError as error:
        raise CpuftError(f"run {run} cannot go on, because {error}: start it anew") from None
    return Resumed(str(path), train, header.world_size, len(record.steps), header.global_batch)
