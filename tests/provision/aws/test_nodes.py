"""Instances become a cluster by the same steps as servers. Here they are simulated hosts, each with its own sshd."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.hosts.hostfile import Host, read_hostfile
from cpuft.hosts.registry import read_entry
from cpuft.hosts.ssh_config import format_known_hosts
from cpuft.hosts.transport import SshTransport
from cpuft.provision.aws import nodes
from cpuft.provision.aws.client import CallError
from cpuft.provision.aws.facts import Resources
from cpuft.provision.aws.nodes import Nodes
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.aws.provider import Aws
from tests.provision.aws.region import (
    NAME,
    NOTHING,
    Region,
    client,
    format_console,
    left,
    make_aws,
    open_region,
    refuse,
    say,
)
from tests.provision.aws.test_plan import GROUP, make_instance
from tests.provision.simulated import Simulated, needs_root, simulate_servers

pytestmark = needs_root
ARMED = "echo 'until 1'; echo 'usec 1000000'; echo 'mode poweroff'; echo 'enabled yes'"
"""Prints what an instance says whose shutdown is scheduled. Simulated hosts have no systemd of their own."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    """Two hosts that stand for instances. Each has a host key of its own."""
    with simulate_servers(tmp_path_factory.mktemp("rented")) as made:
        yield made


def plant(cluster: Simulated, lab: Aws, region: Region, *host_keys: Path) -> None:
    """Write the key that provisioning would have made, and show the host key of each host on its console."""
    source = cluster.folder / "state" / cluster.name / "id_ed25519"
    lab.directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, lab.directory)
    shutil.copy(source.with_suffix(".pub"), lab.directory)
    keys = [path.with_suffix(".pub").read_text().strip() for path in host_keys]
    consoles = {host.name: format_console(key) for host, key in zip(cluster.hosts, keys)}

    def read_console(instance: str) -> str:
        (place,) = client().describe_instances(InstanceIds=[instance])["Reservations"]
        return consoles[place["Instances"][0]["PrivateIpAddress"]]

    region.read_console = read_console


def test_instances_become_a_cluster_once_and_then_nothing_is_missing(
    cluster: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cluster.folder)
    monkeypatch.setattr(nodes, "CHECK_TIMER", ARMED)
    state = cluster.folder / "state" / cluster.name
    addresses = [host.name for host in cluster.hosts]
    with open_region() as region:
        region.addresses = addresses
        options = {"nodes": 2, "prefix": "/mnt/cpuft", "wheels": str(cluster.folder / "wheels"), "uses_ssh": True}
        # Other machines answer at these addresses.
        lab = make_aws(region, tmp_path, **options)
        plant(cluster, lab, region, state / "id_ed25519", state / "id_ed25519")
        with pytest.raises(
            CpuftError,
            match=r"its key has changed.*The instances cost money: remove them",
        ):
            lab.make(say, refuse)
        assert SshTransport(cluster.ssh_config).run(Host(addresses[0]), ("ls", "/mnt")).output == ""
        plant(cluster, lab, region, *(state / f"nodes/{index}/host_key" for index in (1, 2)))
        lab.make(say, refuse)
        assert [host.name for host in read_hostfile(lab.hostfile)] == addresses
        assert read_entry(lab.root, NAME).kind == "aws"
        transport = SshTransport(str(lab.directory / "ssh_config"))
        look = f'cat /mnt/cpuft/clusters/{NAME}/hostfile "$HOME/.ssh/authorized_keys"; ls /mnt/cpuft/env/bin/cpuft'
        master, other = (transport.run(Host(address), ("sh", "-c", look)) for address in addresses)
        assert master.output.startswith("".join(f"{address}\n" for address in addresses))
        assert [one.output.count(f"cpuft-{NAME}\n/mnt/cpuft/env/bin/cpuft\n") for one in (master, other)] == [1, 1]
        check_again(region, make_aws(region, tmp_path, **options))


def make_nodes(folder: Path, address: str) -> Nodes:
    resources = Resources(0.0, group=GROUP, instances=(make_instance(1, private=address, public=address),))
    return Nodes(AwsConfig(name="lab"), resources, {"CPUFT_STATE": str(folder)}, "hostfile")


def test_an_instance_is_never_taken_for_this_machine(tmp_path: Path) -> None:
    """An instance in another network may have this machine's address. Its commands must not run here, as root."""
    found = make_nodes(tmp_path, "127.0.0.1")
    with found._temporary_transport(()) as transport:
        assert transport.command_prefix(Host("127.0.0.1"))[0] == "ssh"
    assert found._make_transport().here == ""


@pytest.mark.parametrize(
    ("mark", "key"), [("i-1", "ssh-ed25519 AAAA i-1"), ("i-2", "ssh-ed25519 BBBB"), ("", "ssh-ed25519 BBBB")]
)
def test_the_known_key_of_an_instance_is_not_accepted_from_another_one_at_its_address(
    mark: str, key: str, tmp_path: Path
) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "known_hosts").write_text(f"10.0.0.1 ssh-ed25519 AAAA {mark}".rstrip() + "\n")
    found = make_nodes(tmp_path, "10.0.0.1")
    assert found._find_keys(lambda instance: {"i-1": "ssh-ed25519 BBBB"}[instance]) == []
    assert found.keys == {"10.0.0.1": key}
    assert format_known_hosts(found._list_members()) == f"10.0.0.1 {' '.join(key.split()[:2])} i-1\n"


@pytest.mark.parametrize(("seconds", "waited"), [(5.0, 6.0), (0.0, 0.0)])
def test_an_instance_without_a_host_key_on_its_console_is_waited_for(
    seconds: float, waited: float, tmp_path: Path
) -> None:
    slept: list[float] = []
    said = r"no ed25519 host key is on the console of 10\.0\.0\.1 \(i-1\): run the same command again.*: remove them"
    with pytest.raises(CpuftError, match=said):
        make_nodes(tmp_path, "10.0.0.1").connect(lambda instance: "", seconds, lambda: sum(slept), slept.append)
    assert sum(slept) == waited


@pytest.mark.parametrize(
    ("code", "said", "waited"),
    [
        ("RequestLimitExceeded", r"AWS cannot do ec2:GetConsoleOutput now .*\. The instances cost money: remove", 6.0),
        ("UnauthorizedOperation", "your AWS credentials lack the permission ec2:GetConsoleOutput", 0.0),
    ],
)
def test_a_console_that_aws_cannot_show_now_is_asked_for_again(
    code: str, said: str, waited: float, tmp_path: Path
) -> None:
    slept: list[float] = []

    def fail(instance: str) -> str:
        raise CallError("ec2:GetConsoleOutput", code, "no")

    with pytest.raises(CpuftError, match=said):
        make_nodes(tmp_path, "10.0.0.1").connect(fail, 5.0, lambda: sum(slept), slept.append)
    assert sum(slept) == waited


def check_again(region: Region, lab: Aws) -> None:
    before = len(region.mutating)
    assert lab.drift() == []
    lab.make(say, refuse)
    assert region.mutating[before:] == []
    lab.down(say)
    assert left(region) == NOTHING
    assert not lab.directory.exists()
    assert not Path(lab.hostfile).exists()


@pytest.mark.parametrize("command", ["true", "echo systemd is not there >&2; exit 1"])
def test_instances_that_would_never_terminate_themselves_are_terminated(
    cluster: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(cluster.folder)
    monkeypatch.setattr(nodes, "make_schedule_command", lambda until, limit: ("sh", "-c", command))
    with open_region() as region:
        region.addresses = [host.name for host in cluster.hosts]
        lab = make_aws(region, tmp_path, nodes=2, wheels=str(cluster.folder / "wheels"), uses_ssh=True)
        state = cluster.folder / "state" / cluster.name
        plant(cluster, lab, region, *(state / f"nodes/{index}/host_key" for index in (1, 2)))
        told: list[str] = []
        with pytest.raises(
            CpuftError, match=r"it is not certain that all instances terminate when their lease ends"
        ) as caught:
            lab.make(told.append, refuse)
        assert str(caught.value).endswith(
            "All instances of lab were terminated: check systemd and cloud-init in the AMI"
        )
        reason = "schedule the shutdown at the end of the lease, because no shutdown is scheduled"
        assert any(reason in line for line in told)
        assert left(region) == NOTHING
