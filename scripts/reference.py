"""Print docs/reference.md: every command with its options, from the code, and the environment variables."""

from __future__ import annotations

import click

from cpuft.cli import cli

_HEAD = """# Reference

This page is generated from the code by `scripts/docs`. Options may also stand in a YAML file that `--config` names, as
`option: value` lines; options on the command line win. Only `--help-all` shows rare options.
"""

_VARIABLES = (
    ("CPUFT_STATE", "you", "folder in which cpuft keeps the clusters that it made"),
    (
        "CPUFT_KERNELS",
        "you",
        "`0` switches the compiled kernels of the fast path off; `compile` compiles them on the host although a wheel "
        "has them",
    ),
    ("CPUFT_MEET_SECONDS", "you, in a job of AWS Batch", "seconds in which all nodes must have arrived (default: 600)"),
    ("CPUFT_CPU_QUOTA", "cpuft", "CPU time in cores that one of several runs of a sweep may use on this machine"),
    ("CPUFT_RUN_DIR", "cpuft", "folder of the run; what your script writes there on the head host is fetched"),
    ("CPUFT_RESUMED", "cpuft", "is set if a script continues an earlier run"),
    ("RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE", "cpuft", "the place of a rank, as under torchrun"),
    ("MASTER_ADDR, MASTER_PORT", "cpuft", "where the ranks meet, as under torchrun"),
    ("HF_TOKEN, WANDB_API_KEY", "you", "reach the ranks of other hosts in a private file, never on a command line"),
)
_TAIL = """
Variables that tune libraries, for example those that begin with `OMP_`, `FI_`, `I_MPI_`, `CCL_` or `HF_HUB_`, are given
to all ranks. A setting of yours always wins over the one that cpuft would choose, and the plan says so.
"""


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def format_command(path: str, command: click.Command) -> list[str]:
    """Return the lines of one command, or of all commands of a group."""
    context = click.Context(command, info_name=path)
    if isinstance(command, click.Group):
        lines: list[str] = []
        for name in command.list_commands(context):
            if found := command.get_command(context, name):
                lines += format_command(f"{path} {name}", found)
        return lines
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"## {path}", "", f"`{path} {usage}`", "", " ".join((command.help or "").split()), ""]
    options = [one for one in command.get_params(context) if isinstance(one, click.Option) and not one.hidden]
    shown = [one for one in options if "--help" not in one.opts]
    for title in ("option", "rare option"):
        some = [one for one in shown if getattr(one, "is_rare", False) == (title != "option")]
        rows = [record for one in some if (record := one.get_help_record(context))]
        lines += [f"| {title} | meaning |", "| --- | --- |"] * bool(rows)
        lines += [
            f"| `{' '.join(flag.split()).replace('|', chr(92) + '|')}` | {_escape(text)} |" for flag, text in rows
        ]
        lines += [""] * bool(rows)
    return lines


def format_reference() -> str:
    """Return the whole page."""
    lines = [_HEAD, *format_command("cpuft", cli), "## Environment variables", ""]
    lines += ["| variable | who sets it | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {who} | {meaning} |" for name, who, meaning in _VARIABLES]
    return "\n".join([*lines, _TAIL])


if __name__ == "__main__":
    print(format_reference(), end="")
