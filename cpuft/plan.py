"""What is about to be done, as data; prints as a shell script that does the same."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Setting:
    """An environment variable, its value and why it has it."""

    name: str
    value: str
    reason: str
    kept: bool = False
    """Whether the value is the user's own, in the place of ours."""


@dataclass(frozen=True)
class Step:
    """One command for one host."""

    why: str
    command: tuple[str, ...]
    settings: tuple[Setting, ...] = ()
    host: str = ""
    """Where it runs; empty for this machine."""
    stdin: str = ""
    """What it reads on standard input: never a secret, because plans are printed."""
    stdin_file: str = ""
    """A file of this machine that it reads on standard input instead."""
    part: str = ""
    """Name of the larger task that many steps like this one belong to, such as pushing all wheels.

    Whoever waits is told of the task, and how far it is, instead of every step.
    """


Stages = tuple[tuple[Step, ...], ...]
"""They run one after another, the steps of a stage side by side."""


@dataclass(frozen=True)
class Plan:
    """Stages, and what to know of them."""

    stages: Stages = ()
    notes: tuple[str, ...] = ()
    """What the user should know of how the plan came about."""
    ways: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The words before a shell line that take it to a host from this machine; a host without is this machine."""

    def here(self, step: Step) -> Step:
        """A step as one of this machine: of another host's, the command that takes it there, settings and all."""
        way = self.ways.get(step.host, ())
        if not way:
            return replace(step, host="")
        settings = ["env", *(f"{setting.name}={setting.value}" for setting in step.settings)] if step.settings else []
        # exec: the command becomes the child of sshd's own process, and ends with it.
        line = f"exec {shlex.join([*settings, *step.command])}"
        return replace(step, host="", command=(*way, line), settings=())


@dataclass(frozen=True)
class RunPlan:
    """A run, part by part."""

    make: Stages = ()
    """The run's directory on the master."""
    inputs: Stages = ()
    """What hosts with disks of their own lack of this machine's files."""
    prepare: Stages = ()
    """Before any rank starts, on the master."""
    ranks: Stages = ()
    """One mpirun, on the master."""
    results: Stages = ()
    """What comes back, and what is taken away after that."""
    partial_cleanup: Stages = ()
    """Removes a run that is not finished from the hosts, except its checkpoints."""
    notes: tuple[str, ...] = ()
    ways: dict[str, tuple[str, ...]] = field(default_factory=dict)
    resumed: bool = False
    """Whether the run's directory is that of an earlier start, and must not be taken away."""
    renewal: tuple[str, ...] = ()
    """The command by which each host's lease goes on while ranks run; who supervises them runs it now and then."""
    keep_host_copies: bool = False
    """Whether hosts keep all files of a run that is not finished, because it will be restarted."""

    @property
    def whole(self) -> Plan:
        """All parts, in the order in which they run."""
        return self.only("make", "inputs", "prepare", "ranks", "results")

    def only(self, *parts: str) -> Plan:
        """Some of its parts."""
        return Plan(tuple(stage for part in parts for stage in getattr(self, part)), self.notes, self.ways)

    def on_master(self) -> RunPlan:
        """What the master does by itself, as it sees that."""
        return RunPlan(
            prepare=self.prepare, ranks=self.ranks, notes=self.notes, resumed=self.resumed, renewal=self.renewal
        )


def format_export(setting: Setting) -> str:
    """One shell line, its reason as comments above: `# why` and `export NAME=value`."""
    return f"{format_comment(setting.reason)}\nexport {setting.name}={shlex.quote(setting.value)}"


def format_comment(text: str) -> str:
    """Shell comment lines: a newline in `text` cannot end the comment and begin a command."""
    return "\n".join(f"# {line}" for line in text.splitlines() or [""])


def format_plan(plan: Plan, folder: str = "") -> str:
    """A shell script that does what the plan does, says each step as it begins, and has a reason for each setting.

    `folder` is what relative paths in it start from; without it, that is where the script is run.
    Settings of a step are set in a subshell of its own; a step's failure ends the script with its exit code.
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
    command = _format_command(plan.here(step).command)
    command += f" <{shlex.quote(step.stdin_file)}" if step.stdin_file else _format_stdin(step.stdin)
    say = f"echo {shlex.quote(f'cpuft: {step.why}')} >&2"
    if not step.settings:
        return f"{say}\n{command}"
    if plan.ways.get(step.host):
        reasons = "\n".join(format_comment(f"{setting.name}: {setting.reason}") for setting in step.settings)
        return f"{say}\n{reasons}\n{command}"
    exports = "\n".join(format_export(setting) for setting in step.settings)
    return f"{say}\n(\n{exports}\n{command}\n)"


def _format_stdin(text: str) -> str:
    """As a quoted word rather than a here-document: no line of the text can end it early.

    A step without must not read the script itself, which may come by a pipe.
    """
    return f" < <(printf %s {shlex.quote(text)})" if text else " </dev/null"


def _format_command(command: tuple[str, ...]) -> str:
    """The command, a line for each argument group so that a person can read it: breaks before flags and `:`."""
    text, width = "", 0
    for word in map(shlex.quote, command):
        if text and width + len(word) > 100 and (word.startswith("-") or word == ":"):
            text, width = text + " \\\n    ", 4
        elif text:
            text += " "
        text, width = text + word, width + len(word) + 1
    return text
