"""The kinds of clusters, and which of them a cluster is that has been made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuft.errors import CpuftError
from cpuft.hosts import registry
from cpuft.provision.aws.doing import Aws
from cpuft.provision.options import AwsConfig, LocalConfig
from cpuft.provision.provider import Provider
from cpuft.provision.servers import Servers
from cpuft.provision.simulated import Local, Plain

KINDS: dict[str, type[Provider[Any, Any]]] = {kind.kind: kind for kind in (Local, Servers, Plain, Aws)}


def recall(name: str, environ: Mapping[str, str]) -> Provider[Any, Any]:
    """The cluster called `name`.

    Raises CpuftError: there is none, it was made elsewhere and this host is one of it, or its entry was not written by
    us.
    """
    entry = registry.read_entry(registry.state_root(environ), name)
    if entry.kind not in KINDS:
        raise CpuftError(f"this host is one of cluster {name}: look at it, or take it down, where it was made")
    return KINDS[entry.kind].recall(entry, environ)


def recall_left(name: str, environ: Mapping[str, str], region: str = "") -> Provider[Any, Any]:
    """As `recall`; or, where nothing is remembered, the local cluster of that name of which something is left here.

    With a `region`: the cluster that is rented there.
    """
    entry = registry.recall(registry.state_root(environ), name)
    if region:
        if entry and (entry.kind, entry.options.get("region")) == ("aws", region):
            return recall(name, environ)
        return Aws(AwsConfig(name=name, region=region), environ)
    if not entry:
        lost = Local(LocalConfig(name=name), environ)
        if lost.show_down().stages:
            return lost
    return recall(name, environ)
