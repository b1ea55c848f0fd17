"""Plans: what is about to be done, as data that can be executed (`cpuft.execute`) or printed as a shell script."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from cpuft.argv import make_shell_line
from cpuft.errors import format_command

_LOCAL_FILES = Path(__file__).with_name("local_files.py")


@dataclass(frozen=True)
class Setting:
    """An environment variable, its value and the reason for the value."""

    name: str
    value: str
    reason: str
    from_user: bool = False
    """Whether this is the user's own value, which is used instead of cpuft's."""


@dataclass(frozen=True)
class Step:
    """One command for one host."""

    why: str
    """What the step does, as a phrase for the user, such as "prepare the data"."""
    command: tuple[str, ...]
    settings: tuple[Setting, ...] = ()
    """Environment variables of the command, in addition to those of the process that runs it."""
    host: str = ""
    """The host on which it runs; empty for this machine."""
    stdin: str = ""
    """The text of its standard input; never a secret, because plans are printed."""
    stdin_file: str = ""
    """A file of this machine to use as standard input instead."""
    part: str = ""
    """The larger task of this and many similar steps, such as pushing all wheels, whose progress the user sees."""


def local_step(why: str, role: str, *arguments: str, stdin: str = "") -> Step:
    """Return a step of this machine, whatever system it has: a role of `cpuft.local_files` with its arguments."""
    return Step(why, (sys.executable, "-IS", str(_LOCAL_FILES), role, *arguments), stdin=stdin)


Stages = tuple[tuple[Step, ...], ...]
"""Stages run one after another; the steps of a stage run at the same time."""


@dataclass(frozen=True)
class Plan:
    """Stages of steps, with notes for the user."""

    stages: Stages = ()
    notes: tuple[str, ...] = ()
    command_prefixes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Host -> what to put before a shell line to run it there, such as `ssh HOST`; this machine has no entry."""

    def as_local(self, step: Step) -> Step:
        """Return a step for this machine that does the given step on its host: the host's prefix, then a shell line
        with the settings and the command. Without a prefix, only `host` changes, to "".
        """
        prefix = self.command_prefixes.get(step.host, ())
        if not prefix:
            return replace(step, host="")
        settings = ["env", *(f"{setting.name}={setting.value}" for setting in step.settings)] if step.settings else []
        # With exec, the command becomes the child of sshd's own process, and ends with it.
        return replace(step, host="", command=(*prefix, make_shell_line([*settings, *step.command])), settings=())


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run, in parts that `full_plan` has in the order of their execution."""

    make: Stages = ()
    """Makes the run's folder on the head host."""
    inputs: Stages = ()
    """Sends files of this machine to hosts that have disks of their own and do not have these files yet."""
    prepare: Stages = ()
    """Prepares the data on the head host, before any rank starts."""
    ranks: Stages = ()
    """Starts the ranks: one mpirun or srun on the head host."""
    results: Stages = ()
    """Fetches the results, and then removes the run from the hosts."""
    partial_cleanup: Stages = ()
    """Removes a run that is not finished from the hosts, except its checkpoints; instead of the end of `results`."""
    claim: Stages = ()
    """Comes first if the ranks work in another run folder: makes that of this machine, and notes where theirs is."""
    notes: tuple[str, ...] = ()
    command_prefixes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Host -> what to put before a shell line to run it there, as in `Plan`."""
    resumed: bool = False
    """Whether the run's folder is from an earlier start, and must not be removed if this one fails."""
    owner: int = 1
    """Number of this start of the run. Each start has a higher one."""
    copy_seconds: float = 0.0
    """While the ranks run, seconds between two looks for a new checkpoint on the head host, which is copied to this
    machine; 0 copies none."""
    script_words: tuple[str, ...] = ()
    """What `cpuft launch --resume RUN` needs besides for the user's own script: its options, "--" and the command."""
    keep_host_copies: bool = False
    """Whether hosts keep all files of a run that is not finished, because it will be restarted."""

    @property
    def full_plan(self) -> Plan:
        """All stages in the order of their execution as one plan, except `partial_cleanup`."""
        return self.select("claim", "make", "inputs", "prepare", "ranks", "results")

    def select(self, *parts: str) -> Plan:
        """Return a plan of the stages of the fields with these names, in this order, with notes and prefixes."""
        return Plan(tuple(stage for part in parts for stage in getattr(self, part)), self.notes, self.command_prefixes)

    def format_resume(self, run_dir: str) -> str:
        """Return the shell line that resumes the run with this folder; it names no hosts, which are noted elsewhere."""
        return format_command(("cpuft", "launch", "--resume", run_dir, *self.script_words))

    def for_head_host(self) -> RunPlan:
        """Return `prepare` and `ranks`, which the head host executes by itself, and the notes; no command prefixes."""
        return RunPlan(prepare=self.prepare, ranks=self.ranks, notes=self.notes, resumed=self.resumed)


def format_export(setting: Setting) -> str:
    """Return the shell lines `# reason` and `export NAME=value`, with the value quoted and no newline at the end."""
    return f"{format_comment(setting.reason)}\nexport {setting.name}={shlex.quote(setting.value)}"


def format_comment(text: str) -> str:
    """Return the text with "# " before each line ("# " for ""), so that no newline in it begins a shell command."""
    return "\n".join(f"# {line}" for line in text.splitlines() or [""])


def format_plan(plan: Plan, folder: str = "") -> str:
    """Return a bash script that does what the plan does, prints each step as it begins, and has each setting's reason.
    Steps of the same stage run in the background at the same time. The failure of a step ends the script with the
    step's exit code. Relative paths begin in `folder`; by default, where the script is run.
    """
    parts = ["#!/usr/bin/env bash", "set -euo pipefail"]
    parts += [format_comment(note) for note in plan.notes]
    parts += [f"cd {shlex.quote(folder)}"] if folder else []
    for stage in plan.stages:
        scripts = [_format_step(step, plan) for step in stage]
        if len(scripts) == 1:
            parts.append(scripts[0])
        else:
            parts += ["pids=()", *(f'{script} &\npids+=("$!")' for script in scripts)]
            parts.append('for pid in "${pids[@]}"; do wait "$pid"; done')
    return "\n".join(parts) + "\n"


def _format_step(step: Step, plan: Plan) -> str:
    command = _format_command(plan.as_local(step).command)
    command += f" <{shlex.quote(step.stdin_file)}" if step.stdin_file else _format_stdin(step.stdin)
    say = f"echo {shlex.quote(f'cpuft: {step.why}')} >&2"
    if not step.settings:
        return f"{say}\n{command}"
    if plan.command_prefixes.get(step.host):
        reasons = "\n".join(format_comment(f"{setting.name}: {setting.reason}") for setting in step.settings)
        return f"{say}\n{reasons}\n{command}"
    exports = "\n".join(format_export(setting) for setting in step.settings)
    return f"{say}\n(\n{exports}\n{command}\n)"


def _format_stdin(text: str) -> str:
    """Return a redirection from a quoted text, or from /dev/null: the script itself may come from a pipe."""
    return f" < <(printf %s {shlex.quote(text)})" if text else " </dev/null"


def _format_command(command: tuple[str, ...]) -> str:
    text, width = "", 0
    for word in map(shlex.quote, command):
        if text and width + len(word) > 100 and (word.startswith("-") or word == ":"):
            text, width = text + " \\\n    ", 4
        elif text:
            text += " "
        text, width = text + word, width + len(word) + 1
    return text
