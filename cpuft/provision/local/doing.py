"""A local cluster: what it has on this machine, and what is done about it."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import cpuft
from cpuft.files import cache_path
from cpuft.hosts.registry import Entry
from cpuft.plan import Plan
from cpuft.provision.image import check_image, read_stamp
from cpuft.provision.local import planning
from cpuft.provision.local.facts import MachineFacts, check_machine, gather_machine
from cpuft.provision.options import LocalConfig
from cpuft.provision.provider import Provider


class Local(Provider[LocalConfig, MachineFacts]):
    """Network namespaces of this machine, as hosts."""

    kind = "local"
    options = LocalConfig

    def __init__(self, config: LocalConfig, environ: Mapping[str, str], entry: Entry | None = None) -> None:
        # What is remembered must hold wherever the next command is typed.
        config = replace(config, image=os.path.abspath(config.image)) if config.image else config
        super().__init__(config, environ, entry)
        self.size = f"{config.nodes} hosts"
        self.layout = self._lay_out()
        if entry:
            self.layout = replace(self.layout, python=entry.python or self.layout.python, settings=entry.settings)

    def _lay_out(self) -> planning.Layout:
        """Without an image the hosts see this machine's files and run this very cpuft; with one, the image's."""
        directory, hostfile, image = str(self.directory), self.hostfile, self.config.image
        if not image:
            settings = {"PYTHONPATH": str(Path(cpuft.__file__).parents[1])}
            # A login to a host has the home of the user database: who runs with another home keeps their own cache.
            if cache_path(self.environ) != cache_path({"HOME": pwd.getpwuid(os.geteuid()).pw_dir}):
                settings["XDG_CACHE_HOME"] = str(cache_path(self.environ).parent)
            return planning.Layout(directory, hostfile, sys.executable, settings)
        stamp = read_stamp(Path(image))
        python = str(stamp.get("python", ""))
        there = f"{Path(python).parents[2]}/clusters/{self.name}" if python else ""
        return planning.Layout(directory, hostfile, python or "python3", {}, there, str(stamp.get("contents", "")))

    def check(self) -> None:
        """Also what this machine cannot do."""
        planning.check_config(self.config)
        check_image(self.config.image)
        check_machine(os.geteuid() == 0)
        super().check()

    def gather(self) -> MachineFacts:
        """What the cluster has on this machine."""
        return gather_machine(self.name, self.directory, Path(self.hostfile))

    def plan(self, facts: MachineFacts) -> Plan:
        """What is missing."""
        return planning.plan_local(self.config, facts, self.layout)

    def plan_down(self, facts: MachineFacts) -> Plan:
        """What is left."""
        return planning.plan_down(self.config, facts, self.layout)

    def plan_fault(self, word: str, node: str) -> Plan:
        """Crash, pause or cut off a host, or take that back."""
        return planning.plan_fault(self.config, self.gather(), self.layout, word, node)

    def describe_hosts(self) -> list[str]:
        """A host's name, address and what it is doing."""
        facts = self.gather()
        members = planning.plan_members(self.config, facts.network)
        return [f"{one.name}  {one.address}  {_state(facts, index)}" for index, one in enumerate(members, start=1)]


def _state(facts: MachineFacts, index: int) -> str:
    node = facts.nodes.get(index)
    if node is None or not node.running:
        return "down"
    words = ["paused"] if node.paused else []
    words += ["cut off"] if node.cut else []
    return ", ".join(words or ["up" if node.answers else "sshd does not answer"]) + f", {node.processes} processes"
