"""A cluster of files alone: a hostfile of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from cpuft.hosts.hostfile import Host, format_hostfile
from cpuft.hosts.registry import FILE_NAME, Entry, format_entry
from cpuft.plan import Plan
from cpuft.provision.local.planning import check_config
from cpuft.provision.options import LocalConfig
from cpuft.provision.ownership import is_ours, plan_removal, read_files
from cpuft.provision.provider import Provider
from cpuft.provision.reconcile import plan_files

Files = dict[str, str]
"""Texts by path."""


class Plain(Provider[LocalConfig, Files]):
    """This machine, with a slot for each host that was asked for."""

    kind = "plain"
    options = LocalConfig

    def __init__(self, config: LocalConfig, environ: Mapping[str, str], entry: Entry | None = None) -> None:
        super().__init__(config, environ, entry)
        self.size = f"this machine with {config.nodes} slots"

    def check(self) -> None:
        """Also the wishes."""
        check_config(self.config)
        super().check()

    def gather(self) -> Files:
        """The cluster's files."""
        return read_files(self.directory, Path(self.hostfile))

    def plan(self, facts: Files) -> Plan:
        """The files that differ."""
        options = {key: str(value) for key, value in asdict(self.config).items()}
        hosts = (Host("localhost", self.config.nodes),)
        texts = {
            f"{self.directory}/{FILE_NAME}": format_entry(Entry(self.name, self.kind, self.hostfile, options=options)),
            self.hostfile: f"# Cluster {self.name}, made by cpuft provision.\n{format_hostfile(hosts)}",
        }
        steps = plan_files(texts, facts, "write the hostfile, and remember it")
        return Plan(tuple((step,) for step in steps))

    def plan_down(self, facts: Files) -> Plan:
        """Its files."""
        directory = str(self.directory)
        return Plan((plan_removal(facts, directory, self.hostfile),) if is_ours(facts, directory) else ())

    def describe_hosts(self) -> list[str]:
        """This machine tells nothing more."""
        return []
