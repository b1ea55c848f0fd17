"""The verbs of a local cluster: each gathers facts, plans with `local`, executes, looks again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import cpuft
from cpuft.files import write_text
from cpuft.hosts.hostfile import Host, format_hostfile
from cpuft.hosts.registry import FILE_NAME, Entry, format_entry, read_entry, recall, refuse_other_kind, state_root
from cpuft.options.clusters import LocalConfig
from cpuft.plan import Plan, format_plan
from cpuft.provision.image.build import check_image, read_stamp
from cpuft.provision.local import planning
from cpuft.provision.local.facts import MachineFacts, check_machine, gather_machine
from cpuft.provision.ownership import check_places
from cpuft.provision.reconcile import lock, make_runner, reconcile, run_stages

Say = Callable[[str], None]


def check(config: LocalConfig) -> None:
    """Raises CpuftError when the cluster cannot be had on this machine."""
    planning.check_config(config)
    check_image(config.image)
    check_machine(os.geteuid() == 0)


def make(config: LocalConfig, environ: Mapping[str, str], say: Say) -> str:
    """Make or repair the cluster; a sentence for the user."""
    config = _without_here(config)
    place = _place(config, environ)
    refuse_other_kind(state_root(environ), config.name, "local")
    check_places(place.directory, place.hostfile)

    def plan(facts: MachineFacts) -> Plan:
        return planning.plan_local(config, facts, place)

    with lock(Path(f"{place.directory}.lock")):
        found = _gather(config.name, place)
        plan(found)
        # Remembered before anything is made, so that `down` finds what a killed run has left.
        write_text(Path(place.directory, FILE_NAME), format_entry(planning.make_entry(config, place)))
        reconcile(partial(_gather, config.name, place), plan, make_runner(), say, found)
    made = f"cluster {config.name}: {config.nodes} hosts in {_shown(place.hostfile)}"
    return f"{made}; next: cpuft doctor --cluster {config.name}"


def show(config: LocalConfig, environ: Mapping[str, str]) -> str:
    """The first plan, as a script."""
    config = _without_here(config)
    place = _place(config, environ)
    return format_plan(planning.plan_local(config, _gather(config.name, place), place))


def write_plain(config: LocalConfig, environ: Mapping[str, str]) -> str:
    """A hostfile of this machine alone, with a slot for each host that was asked for."""
    planning.check_config(config)
    place = _place(config, environ)
    refuse_other_kind(state_root(environ), config.name, "plain")
    check_places(place.directory, place.hostfile)
    entry = Entry(config.name, "plain", place.hostfile, options=_options(config))
    text = f"# Cluster {config.name}, made by cpuft provision.\n" + format_hostfile((Host("localhost", config.nodes),))
    write_text(Path(place.directory, FILE_NAME), format_entry(entry))
    write_text(Path(place.hostfile), text)
    return f"cluster {config.name}: this machine with {config.nodes} slots in {_shown(place.hostfile)}"


def make_fault(name: str, word: str, node: str, environ: Mapping[str, str], say: Say) -> None:
    """Crash, pause or cut off a host, or take that back."""
    config, place = _find(name, environ)
    run_stages(planning.plan_fault(config, _gather(name, place), place, word, node), make_runner(), say)


def take_down(name: str, environ: Mapping[str, str], say: Say) -> None:
    """Leave nothing of the cluster on this machine.

    Raises
    ------
    CpuftError: there is nothing of that name.
    """
    config, place, _ = _plan_down(name, environ)
    with lock(Path(f"{place.directory}.lock")):
        gather = partial(_gather, name, place)
        reconcile(gather, lambda facts: planning.plan_down(config, facts, place), make_runner(), say)


def show_down(name: str, environ: Mapping[str, str]) -> str:
    """What `take_down` would do, as a script."""
    return format_plan(_plan_down(name, environ)[-1])


def _plan_down(name: str, environ: Mapping[str, str]) -> tuple[LocalConfig, planning.Place, Plan]:
    config, place = _remembered(name, environ)
    plan = planning.plan_down(config, _gather(name, place), place)
    if not plan.stages:
        read_entry(state_root(environ), name)
    return config, place, plan


def describe(name: str, environ: Mapping[str, str]) -> str:
    """A line a host: its name, address and what it is doing."""
    config, place = _find(name, environ)
    entry = read_entry(state_root(environ), name)
    lines = [f"cluster {name} ({entry.kind}), hostfile {_shown(entry.hostfile)}"]
    if entry.kind == "local":
        facts = _gather(name, place)
        for index, member in enumerate(planning.plan_members(config, facts.network), start=1):
            lines.append(f"  {member.name}  {member.address}  {_state(facts, index)}")
    return "\n".join(lines) + "\n"


def list_drift(name: str, environ: Mapping[str, str]) -> list[str]:
    """What a new `cpuft provision` would do, a line each."""
    config, place = _find(name, environ)
    if read_entry(state_root(environ), name).kind != "local":
        return []
    plan = planning.plan_local(config, _gather(name, place), place)
    return [f"{_subject(step.settings, step.command[-2])}: {step.why}" for stage in plan.stages for step in stage]


def _subject(settings: tuple[object, ...], path: str) -> str:
    return str(getattr(settings[0], "value", path)) if settings else path


def _state(facts: MachineFacts, index: int) -> str:
    node = facts.nodes.get(index)
    if node is None or not node.running:
        return "down"
    words = ["paused"] if node.paused else []
    words += ["cut off"] if node.cut else []
    return ", ".join(words or ["up" if node.answers else "sshd does not answer"]) + f", {node.processes} processes"


def _gather(name: str, place: planning.Place) -> MachineFacts:
    return gather_machine(name, Path(place.directory), Path(place.hostfile))


def _without_here(config: LocalConfig) -> LocalConfig:
    """What is remembered must hold wherever the next command is typed."""
    return replace(config, image=os.path.abspath(config.image)) if config.image else config


def _place(config: LocalConfig, environ: Mapping[str, str]) -> planning.Place:
    """Without an image the hosts see this machine's files and run this very cpuft; with one, the image's."""
    directory, hostfile = str(state_root(environ) / config.name), str(Path("hostfiles", config.name).absolute())
    if not config.image:
        return planning.Place(directory, hostfile, sys.executable, {"PYTHONPATH": str(Path(cpuft.__file__).parents[1])})
    stamp = read_stamp(Path(config.image))
    python = str(stamp.get("python", ""))
    there = f"{Path(python).parents[2]}/clusters/{config.name}" if python else ""
    return planning.Place(directory, hostfile, python or "python3", {}, there, str(stamp.get("contents", "")))


def _find(name: str, environ: Mapping[str, str]) -> tuple[LocalConfig, planning.Place]:
    read_entry(state_root(environ), name)
    return _remembered(name, environ)


def _remembered(name: str, environ: Mapping[str, str]) -> tuple[LocalConfig, planning.Place]:
    """What the cluster was asked to be; by its name alone where that was lost."""
    entry = recall(state_root(environ), name)
    if not entry:
        config = LocalConfig(name=name)
        return config, _place(config, environ)
    config = _parse_options(entry.options)
    place = replace(_place(config, environ), hostfile=entry.hostfile)
    return config, replace(place, python=entry.python or place.python, settings=entry.settings)


def _options(config: LocalConfig) -> dict[str, str]:
    return {field.name: str(getattr(config, field.name)) for field in fields(config)}


def _parse_options(options: Mapping[str, str]) -> LocalConfig:
    from cpuft.options.flags import parse_arguments

    return parse_arguments(LocalConfig, [f"--{key.replace('_', '-')}={value}" for key, value in options.items()])


def _shown(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
