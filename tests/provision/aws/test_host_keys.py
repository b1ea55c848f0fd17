"""Rotation of host keys: at every moment ssh with StrictHostKeyChecking finds a key that it knows."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.hosts.hostfile import Host
from cpuft.hosts.ssh_config import Member, format_known_hosts, format_ssh_config
from cpuft.hosts.transport import SshTransport
from cpuft.provision.aws import nodes
from cpuft.provision.aws.facts import Instance
from cpuft.provision.aws.nodes import Nodes, choose_keys, find_known_keys, plan_rotation
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.servers import ServerFacts
from tests.hosts.test_transport import free_port, wait_for

GIVEN = "ecdsa-sha2-nistp256 AAAA"
OWN = "ssh-ed25519 BBBB"
MEMBER = Member("10.0.0.1", "10.0.0.1", "root", reached="54.0.0.1", mark="i-1")


def test_an_instance_is_never_taken_for_this_machine(tmp_path: Path) -> None:
    """An instance in another network may have this machine's address. Its commands must not run here, as root."""
    one = Instance("i-1", "lab", "running", "t", "z", "127.0.0.1", "127.0.0.1", False, 0.0, 0.0, 0, 0, 0)
    nodes = Nodes(AwsConfig(name="lab"), (one,), {"CPUFT_STATE": str(tmp_path)}, "hostfile")
    with nodes._temporary_transport(()) as transport:
        assert transport.command_prefix(Host("127.0.0.1"))[0] == "ssh"
    assert nodes._make_transport().here == ""


@pytest.mark.parametrize(
    ("there", "keys", "next_"),
    [
        ((f"{GIVEN} cpuft",), GIVEN, ["make"]),
        ((f"{GIVEN} cpuft", f"{OWN} cpuft-own"), f"{GIVEN}\n{OWN}", ["forget"]),
        ((f"{OWN} cpuft-own",), OWN, []),
        ((), GIVEN, []),
        (("ssh-ed25519 CCCC root@this", "ecdsa-sha2-nistp256 DDDD root@this"), GIVEN, []),
        ((f"{GIVEN} cpuft", "ssh-ed25519 CCCC root@image"), GIVEN, ["make"]),
    ],
    ids=("born", "both", "own", "elsewhere", "a simulated host", "another's"),
)
def test_the_accepted_host_keys_and_the_next_step_of_a_rotation(
    there: tuple[str, ...], keys: str, next_: list[str]
) -> None:
    assert choose_keys(GIVEN, there) == keys
    steps = plan_rotation([(MEMBER, ServerFacts(host_keys=there))], GIVEN)
    assert [step.command[4] for step in steps] == next_
    assert [step.host for step in steps] == ["10.0.0.1"] * len(next_)


def test_the_known_key_of_a_host_is_not_accepted_from_another_host_at_its_address() -> None:
    text = format_known_hosts([replace(MEMBER, key=f"{GIVEN} cpuft\n{OWN} cpuft-own")])
    assert text == f"10.0.0.1 {GIVEN} i-1\n10.0.0.1 {OWN} i-1\n"
    assert find_known_keys(text, MEMBER) == f"{GIVEN}\n{OWN}"
    assert find_known_keys(text, replace(MEMBER, mark="i-2")) == ""
    assert find_known_keys(f"10.0.0.1 {OWN}\n", MEMBER) == ""


class Born:
    """A host with the shared host key, and this machine's files about it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.given = " ".join((folder / "etc/ssh_host_ecdsa_key.pub").read_text().split()[:2])
        self.known = folder / "known_hosts"
        self.config = folder / "config"

    def look(self) -> ServerFacts:
        return ServerFacts(host_keys=tuple(path.read_text().strip() for path in self.folder.glob("etc/*.pub")))

    def remember(self) -> None:
        """As provisioning does after it has looked."""
        key = choose_keys(self.given, self.look().host_keys)
        member = Member("host", "host", "root", self.port, key, "127.0.0.1", "i-1")
        self.known.write_text(format_known_hosts([member]))
        self.config.write_text(format_ssh_config([member], str(self.folder / "client"), str(self.known)))

    def step(self) -> None:
        """The next step, on the host, by a way that is as strict."""
        (one,) = plan_rotation([(MEMBER, self.look())], self.given)
        places = {nodes._FOLDER: f"{self.folder}/etc", nodes._PIDFILE: f"{self.folder}/pid"}
        answer = SshTransport(str(self.config)).run(Host("host"), [places.get(word, word) for word in one.command])
        assert (answer.exit_code, answer.errors) == (0, "")

    def check(self) -> None:
        """paramiko and ssh's own program get in, without a question."""
        assert SshTransport(str(self.config)).run(Host("host"), ("echo", "in")).output == "in\n"
        words = ["ssh", "-F", str(self.config), "-o", "BatchMode=yes", "host", "echo", "in"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
        assert (done.stdout, done.returncode) == ("in\n", 0), done.stderr


@pytest.fixture
def born(tmp_path: Path) -> Iterator[Born]:
    port, etc = free_port(), tmp_path / "etc"
    etc.mkdir()
    for kind, path in (("ecdsa", etc / "ssh_host_ecdsa_key"), ("ed25519", tmp_path / "client")):
        subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "cpuft", "-f", str(path)], check=True)
    lines = [f"ListenAddress 127.0.0.1:{port}", f"PidFile {tmp_path}/pid", "UsePAM no", "StrictModes no"]
    lines += [f"HostKey {etc}/ssh_host_{kind}_key" for kind in ("rsa", "ecdsa", "ed25519")]
    lines += [f"AuthorizedKeysFile {tmp_path}/client.pub", "PasswordAuthentication no"]
    (tmp_path / "conf").write_text("\n".join(lines) + "\n")
    Path("/run/sshd").mkdir(exist_ok=True)
    command = ["/usr/sbin/sshd", "-D", "-e", "-f", str(tmp_path / "conf")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(port)
            yield Born(tmp_path, port)
        finally:
            process.terminate()


@pytest.mark.skipif(os.geteuid() != 0, reason="sshd needs root")
def test_a_host_can_be_verified_at_every_moment_of_a_rotation(born: Born) -> None:
    born.remember()
    born.check()
    born.step()
    # A process that is killed here knows the shared key only.
    born.check()
    born.remember()
    born.check()
    assert born.known.read_text().count("\n") == 2
    born.step()
    # A process that is killed here knows both keys.
    born.check()
    born.remember()
    born.check()
    assert born.known.read_text().split()[1] == "ssh-ed25519"
    assert [path.name for path in sorted(born.folder.glob("etc/*"))] == [
        "ssh_host_ed25519_key",
        "ssh_host_ed25519_key.pub",
    ]
    assert plan_rotation([(MEMBER, born.look())], born.given) == ()
    # The key in user data is of no use any more.
    name = f"[host]:{born.port}"
    born.known.write_text(f"{name} {born.given} i-1\n")
    with pytest.raises(CpuftError, match="its key has changed"):
        SshTransport(str(born.config)).run(Host("host"), ("true",))


@pytest.mark.skipif(os.geteuid() != 0, reason="sshd needs root")
@pytest.mark.parametrize("left", ["ssh_host_ed25519_key", "ssh_host_ed25519_key.new"])
def test_a_key_that_was_half_made_is_made_anew(left: str, born: Born) -> None:
    (born.folder / "etc" / left).write_text("half")
    born.remember()
    born.step()
    born.remember()
    born.check()
    assert born.known.read_text().count("\n") == 2
