"""What must hold before anything is rented: judged from what AWS said of it. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from cpuft.errors import CpuftError, near_names
from cpuft.provision.aws.facts import Found, Offer, is_standard
from cpuft.provision.aws.options import AwsConfig

QUOTAS = {False: "L-1216C47A", True: "L-34B43A08"}
"""Of service ec2: vCPUs of running standard instances, on demand and spot."""
DEBIAN = "/aws/service/debian/release/12/latest/amd64"
"""AWS's parameter that names Debian 12's newest image."""
_LEAST_PREFIX = 16


def parse_ssh_from(text: str) -> str:
    """A range of addresses from what a user said: `203.0.113.7` is `203.0.113.7/32`. Raises CpuftError."""
    try:
        found = ipaddress.IPv4Network(text.strip())
    except ValueError:
        raise CpuftError(f"--ssh-from {text!r:.60} is no IPv4 address: give yours, such as 203.0.113.7") from None
    if found.prefixlen < _LEAST_PREFIX:
        raise CpuftError(f"--ssh-from {text} is as good as the whole world: give your own address")
    return str(found)


def check_offer(config: AwsConfig, found: Found, offer: Offer, region: str) -> Offer:
    """The offer. Raises CpuftError when what is missing cannot be rented."""
    missing = config.nodes - len(found.live)
    market = "spot" if config.spot else "on-demand"
    if market not in offer.markets:
        raise CpuftError(f"{config.type} is not rented {market}: choose another --type")
    if "x86_64" not in offer.architectures:
        machine = "/".join(offer.architectures)
        raise CpuftError(f"{config.type} is {machine}, and cpuft needs x86_64: choose an Intel one with --type")
    if offer.image.architecture not in ("x86_64", ""):
        raise CpuftError(f"image {offer.image.id} is for {offer.image.architecture}: name one for x86_64 with --image")
    if config.threads_per_core == 1 and offer.threads and 1 not in offer.threads:
        raise CpuftError(f"{config.type} cannot leave a core's second thread out: drop --threads-per-core")
    if config.zone and config.zone not in offer.all_zones:
        raise CpuftError(
            f"{region} has no zone {config.zone!r:.60} for you: {near_names(config.zone, offer.all_zones)}"
        )
    if not offer.zones:
        raise CpuftError(f"no zone of {region} with a default subnet has {config.type}: try another --type or --region")
    _check_zones(config, offer, missing)
    _check_quota(config, offer, missing)
    return offer


def _check_zones(config: AwsConfig, offer: Offer, missing: int) -> None:
    zones = [zone for zone in offer.zones if zone.name == (config.zone or zone.name)]
    if not zones:
        others = ", ".join(zone.name for zone in offer.zones)
        raise CpuftError(f"{config.type} is not offered in {config.zone}, but in {others}: choose one of these")
    most = max(zone.addresses for zone in zones)
    if most < missing:
        raise CpuftError(
            f"{missing} instances are asked for, and the subnets have {most} free addresses: ask for fewer"
        )


def _check_quota(config: AwsConfig, offer: Offer, missing: int) -> None:
    """Of types with a quota of their own nothing is known before they are asked for."""
    asked = missing * offer.vcpus
    if offer.quota is not None and is_standard(config.type) and offer.used + asked > offer.quota:
        fit = max(0, int(offer.quota - offer.used) // offer.vcpus)
        code = QUOTAS[config.spot]
        raise CpuftError(
            f"{missing} x {config.type} are {asked} vCPUs; {offer.quota:.0f} may run at a time, {offer.used} do now: "
            f"{f'ask for {fit} nodes, or ' if fit else ''}have quota {code} raised in Service Quotas"
        )


def name_unknown(kind: str, known: Iterable[str]) -> str:
    """What to say of a type that a region does not have."""
    return f"AWS knows no type {kind!r:.60} here: {near_names(kind, known)}"
