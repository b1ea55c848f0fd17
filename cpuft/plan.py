"""What is about to be done, as data; prints as a shell script that does the same."""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass, field

from cpuft.loader import load, parse_json


@dataclass(frozen=True)
class Setting:
    """An environment variable, its value and why it has it."""

    name: str
    value: str
    reason: str


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


@dataclass(frozen=True)
class Plan:
    """Stages run one after another, the steps of a stage side by side."""

    stages: tuple[tuple[Step, ...], ...] = ()
    notes: tuple[str, ...] = field(default=())
    """What the user should know of how the plan came about."""


def dump_plan(plan: Plan) -> str:
    """JSON that `load_plan` reads back as an equal plan."""
    return json.dumps(dataclasses.asdict(plan))


def load_plan(text: str) -> Plan:
    """The plan that `dump_plan` wrote. Raises ValueError for another text."""
    return load(Plan, parse_json(text), "the plan")


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
        scripts = [_format_step(step) for step in stage]
        if len(scripts) == 1:
            parts.append(scripts[0])
        else:
            parts += ["pids=()", *(f'{script} &\npids+=("$!")' for script in scripts)]
            parts.append('for pid in "${pids[@]}"; do wait "$pid"; done')
    return "\n".join(parts) + "\n"


def _format_step(step: Step) -> str:
    command = _format_command(step.command)
    if step.host:
        remote = " ".join([f"{s.name}={shlex.quote(s.value)}" for s in step.settings] + [command])
        command = f"ssh -o BatchMode=yes {shlex.quote(step.host)} {shlex.quote(remote)}"
    command += f" <{shlex.quote(step.stdin_file)}" if step.stdin_file else _format_stdin(step.stdin)
    say = f"echo {shlex.quote(f'cpuft: {step.why}')} >&2"
    if step.host or not step.settings:
        return f"{say}\n{command}"
    exports = "\n".join(format_export(setting) for setting in step.settings)
    return f"{say}\n(\n{exports}\n{command}\n)"


def _format_stdin(text: str) -> str:
    """As a quoted word rather than a here-document: no line of the text can end it early."""
    return f" < <(printf %s {shlex.quote(text)})" if text else ""


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
