"""The ssh transport, with real ssh servers on loopback ports, one of them a bastion."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import paramiko
import pytest

from cpuft.config.launch import LaunchConfig
from cpuft.errors import CpuftError
from cpuft.execute import Answer, run_stage
from cpuft.hosts import ssh_config
from cpuft.hosts import transport as transport_module
from cpuft.hosts.cluster import Access, gather_cluster
from cpuft.hosts.facts import find_free_port
from cpuft.hosts.hostfile import Host
from cpuft.hosts.ssh_config import parse_jumps
from cpuft.hosts.transport import HostError, SshTransport, Transport, map_hosts
from cpuft.plans import Plan, Setting, Step
from tests.provision.simulated import needs_root

pytestmark = pytest.mark.real

AWKWARD = ("a 0", 'a"=0"', "a'; echo foo", "$HOME", "two\nlines", "")
HOST = Host("far")


@dataclass(frozen=True)
class Server:
    """An ssh server, and the key it shows."""

    port: int
    key: str


def make_key(path: Path) -> str:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True, timeout=20)
    return " ".join(path.with_name(f"{path.name}.pub").read_text().split()[:2])


@contextmanager
def serve(folder: Path, forwards: bool, shell: str = "", *options: str) -> Iterator[Server]:
    """Start a server that accepts the client's key; with `forwards` it is a bastion.

    With a login shell, the user's home there is `folder`.
    """
    folder.mkdir()
    port, key = find_free_port(), make_key(folder / "host_key")
    lines = [f"ListenAddress 127.0.0.1:{port}", f"HostKey {folder}/host_key", "PidFile none", "UsePAM no"]
    lines += [f"AuthorizedKeysFile {folder.parent}/client.pub", "StrictModes no", "PasswordAuthentication no"]
    lines += [f"AllowTcpForwarding {'yes' if forwards else 'no'}", *options]
    (folder / "conf").write_text("\n".join(lines) + "\n")
    Path("/run/sshd").mkdir(exist_ok=True)
    command = f"exec /usr/sbin/sshd -D -e -f {folder}/conf"
    if shell:
        users = Path("/etc/passwd").read_text()
        (folder / "passwd").write_text(re.sub("(?m)^root:.*$", f"root:x:0:0::{folder}:{shutil.which(shell)}", users))
        command = f"mount --bind {folder}/passwd /etc/passwd; {command}"
    words = [*(["unshare", "--mount"] if shell else []), "sh", "-c", command]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(port)
            yield Server(port, key)
        finally:
            process.terminate()


def wait_for(port: int) -> None:
    for _ in range(200):
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens on {port}")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server, Path]]:
    """The host, the bastion before it, and the folder of the client's key."""
    folder = tmp_path_factory.mktemp("transport")
    make_key(folder / "client")
    with ExitStack() as stack:
        host = stack.enter_context(serve(folder / "host", forwards=False))
        bastion = stack.enter_context(serve(folder / "bastion", forwards=True))
        yield host, bastion, folder


@pytest.fixture
def config(servers: tuple[Server, Server, Path], tmp_path: Path) -> Path:
    """A client configuration for `far`, with the keys of both known."""
    host, bastion, folder = servers
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{host.port} {host.key}\n[127.0.0.1]:{bastion.port} {bastion.key}\n")
    lines = ["Host far", f"  Port {host.port}", "Host bastion", f"  Port {bastion.port}", "Host *"]
    lines += ["  HostName 127.0.0.1", f"  IdentityFile {folder}/client", "  IdentitiesOnly yes"]
    lines += [f"  UserKnownHostsFile {known}", "  GlobalKnownHostsFile /dev/null"]
    path = tmp_path / "ssh_config"
    path.write_text("\n".join(lines) + "\n")
    return path


@contextmanager
def foreign(tmp_path: Path, shell: str, *options: str, config: str = "", start_up: str = "") -> Iterator[Transport]:
    """A server of somebody with a login shell, a .bashrc, options of sshd_config and lines for it in ssh_config."""
    make_key(tmp_path / "client")
    with serve(tmp_path / "there", True, shell, *options) as server:
        (tmp_path / "there" / ".bashrc").write_text(start_up)
        (tmp_path / "known_hosts").write_text(f"[127.0.0.1]:{server.port} {server.key}\n")
        lines = [f"  Port {server.port}", "HostName 127.0.0.1", f"IdentityFile {tmp_path}/client"]
        lines += [f"UserKnownHostsFile {tmp_path}/known_hosts", *config.splitlines()]
        (tmp_path / "ssh_config").write_text("Host far\n" + "\n  ".join(lines) + "\n")
        yield SshTransport(str(tmp_path / "ssh_config"))


def run_step(transport: Transport, *command: str, stdin: str = "", count: int = 1) -> list[Answer]:
    """Run a command on the host as a step of a plan, perhaps several times at once."""
    plan = Plan(command_prefixes={"far": transport.command_prefix(HOST)})
    return run_stage(plan, [Step("do", command, host="far", stdin=stdin)] * count, 60)


def change(config: Path, old: str, new: str) -> Transport:
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new))
    return SshTransport(str(config))


def test_arguments_arrive_as_they_are(config: Path) -> None:
    script = 'for word; do printf "%s." "$word"; done; cat; echo "$1" >&2; exit 3'
    answer = SshTransport(str(config)).run(HOST, ("sh", "-c", script, "sh", *AWKWARD), "given")
    assert (answer.exit_code, answer.output) == (3, "".join(f"{word}." for word in AWKWARD) + "given")
    assert answer.errors.endswith("a 0\n")  # the login shell may have said something before


@needs_root
@pytest.mark.parametrize("shell", ["tcsh", "fish", "bash"])
def test_every_login_shell_runs_commands_and_steps(tmp_path: Path, shell: str) -> None:
    script = "for word; do # each\n  printf '%s!' \"$word\"\ndone; cat"
    command = ("sh", "-c", script, "sh", *AWKWARD, "!!", "\\\\'")
    expected = "".join(f"{word}!" for word in command[4:]) + "given"
    with foreign(tmp_path, shell) as transport:
        assert transport.run(HOST, command, "given") == Answer(0, expected, "")
        assert run_step(transport, *command, stdin="given") == [Answer(0, expected)]


@needs_root
@pytest.mark.parametrize(
    "start_up, said",
    [
        ("echo hello there", r"its login shell prints 'hello there' before each command: let ~/\.bashrc there, or "),
        ("printf hello", "its login shell prints 'hello' before each command"),
        ("exit 3", "its login shell ended with exit code 3 before the command ran: ''"),
        ("exec cat", "its login shell ended with exit code 0 before the command ran: 'given'"),
    ],
)
def test_a_start_up_file_that_prints_or_ends_the_shell_is_named(tmp_path: Path, start_up: str, said: str) -> None:
    with foreign(tmp_path, "bash", start_up=start_up) as transport:
        with pytest.raises(HostError, match=said) as error:
            transport.run(HOST, ("cat",), "given")
        assert (error.value.kind, error.value.is_transient) == ("no commands", False)


@needs_root
def test_options_for_people_at_a_terminal_do_not_break_commands(tmp_path: Path) -> None:
    lines = "RemoteCommand tmux\nRequestTTY force\nExitOnForwardFailure yes\nLocalForward 127.0.0.1:{} localhost:1"
    with foreign(tmp_path, "bash", config=lines.format(find_free_port())) as transport:
        assert run_step(transport, "cat", stdin="a\n", count=3) == [Answer(0, "a\n")] * 3
        assert transport.run(HOST, ("cat",), "a\n").output == "a\n"


def test_a_user_without_an_entry_in_passwd_is_told_so(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    with pytest.raises(CpuftError, match=r"^host far .* in /etc/passwd, and user 4000000 has none: add one"):
        SshTransport(str(config)).run(HOST, ("true",))


@needs_root
def test_more_logins_at_once_than_a_server_accepts_are_tried_again(tmp_path: Path) -> None:
    with foreign(tmp_path, "bash", "MaxStartups 1") as transport:
        answers = map_hosts(lambda host: transport.run(host, ("echo", "a")), [HOST] * 6)
        assert [one.output for one in answers] == ["a\n"] * 6
        assert [one.output for one in run_step(transport, "echo", "a", count=6)] == ["a\n"] * 6


def test_input_and_output_may_flow_at_the_same_time(config: Path) -> None:
    answer = SshTransport(str(config)).run(HOST, ("tee", "/dev/stderr"), "0123456789abcde\n" * 400_000)
    assert (len(answer.output), answer.exit_code) == (6_400_000, 0)
    assert answer.errors.endswith(answer.output)


def test_this_machine_needs_no_ssh() -> None:
    transport = SshTransport("/nowhere")
    assert transport.run(Host("localhost"), ("cat",), "given") == Answer(0, "given", "")
    assert transport.command_prefix(Host("localhost")) == ()


def test_hosts_reach_each_other_by_the_address_that_the_hostfile_gives(tmp_path: Path) -> None:
    """A rented host has another address for this machine, by which traffic among hosts would leave their network."""
    config = tmp_path / "config"
    config.write_text("Host 10.0.0.5\n  HostName 203.0.113.9\nHost gate\n  HostName 203.0.113.9\n")
    transport = SshTransport(str(config))
    assert [transport.address(Host(name)) for name in ("10.0.0.5", "gate")] == ["10.0.0.5", "203.0.113.9"]


def test_hosts_behind_ports_of_one_router_reach_each_other_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host a b\n  HostName 203.0.113.9\nHost c\n  HostName 203.0.113.8\n")
    transport = SshTransport(str(tmp_path / "config"))
    behind = [Host("a", port=2201), Host("b", port=2202), Host("c", port=2203)]
    assert transport.addresses(behind) == ["a", "b", "203.0.113.8"]
    same = [Host("a", port=2201), Host("b", port=2201)]  # a host under two names
    assert transport.addresses(same) == ["203.0.113.9", "203.0.113.9"]


def test_a_host_with_only_an_ipv6_address_is_told_from_one_without_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, said = SshTransport(str(tmp_path / "none")), "is an IPv6 address, and ranks connect over IPv4: write"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words: [] if words[0] == "six.example" else socket.inet_aton(""))
    for name, message in (
        ("fe80::1", f"host fe80::1 {said}"),
        ("six.example", f"host six.example: its only address {said}"),
        ("none.example", "host none.example has no address"),
    ):
        with pytest.raises(CpuftError, match=f"^{message}"):
            transport.address(Host(name))


def test_the_command_prefix_of_a_plan_reaches_the_host(config: Path) -> None:
    step = Step("say", ("sh", "-c", 'echo "$A" "$1"', "sh", "$HOME"), (Setting("A", "a 0", "so"),), "far")
    words = Plan(command_prefixes={"far": SshTransport(str(config)).command_prefix(HOST)}).as_local(step).command
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    assert done.stdout == "a 0 $HOME\n", done.stderr


@pytest.mark.parametrize(
    "line", ["ProxyJump bastion", "ProxyCommand ssh -F {config} -W 127.0.0.1:{port} bastion", "HostKeyAlias alias"]
)
def test_bastions_proxies_and_aliases(config: Path, servers: tuple[Server, Server, Path], line: str) -> None:
    host, _, _ = servers
    change(config, "Host far\n", f"Host far\n  {line.format(config=config, port=host.port)}\n")
    known = config.with_name("known_hosts")
    known.write_text(f"{known.read_text()}alias {host.key}\n")
    assert SshTransport(str(config)).run(HOST, ("echo", "there")).output == "there\n"
    assert subprocess.run((*SshTransport(str(config)).command_prefix(HOST), "true"), timeout=20).returncode == 0


def test_a_bastion_that_forwards_nothing_is_named(config: Path, servers: tuple[Server, Server, Path]) -> None:
    host, _, _ = servers
    change(config, "Host far\n", f"Host back\n  Port {host.port}\n  ProxyJump far\nHost far\n")
    with pytest.raises(HostError, match=r"the bastion does not connect to it, .*: see AllowTcpForwarding"):
        SshTransport(str(config)).run(Host("back"), ("true",))


def test_through_a_bastion_a_host_may_have_a_name_that_only_the_others_know(config: Path) -> None:
    change(config, "Host far\n", "Host far\n  ProxyJump bastion\n  HostName inside.invalid\n")
    assert SshTransport(str(config)).address(HOST) == "inside.invalid"
    with pytest.raises(CpuftError, match=r"host elsewhere\.invalid has no address"):
        SshTransport().address(Host("elsewhere.invalid"))


@pytest.mark.parametrize(
    "old, new, kind",
    [
        ("Host far\n", "Host far\n  Port 9\n", transport_module.UNREACHABLE),
        ("IdentityFile", "IdentityFile /dev/null\n  CertificateFile", transport_module.LOGIN_REFUSED),
        ("UserKnownHostsFile", "UserKnownHostsFile /dev/null\n  CertificateFile", transport_module.KEY_UNKNOWN),
        ("Host far", "Host far\n  HostKeyAlias nobody", transport_module.KEY_UNKNOWN),
        ("Host far", "Host far\n  ProxyJump nowhere:9", transport_module.UNREACHABLE),
    ],
)
def test_errors_have_a_kind(config: Path, old: str, new: str, kind: str) -> None:
    with pytest.raises(HostError) as error:
        change(config, old, new).run(HOST, ("true",))
    assert error.value.kind == kind


def test_the_message_about_an_unknown_key_says_how_to_accept_it(
    config: Path, servers: tuple[Server, Server, Path]
) -> None:
    with pytest.raises(HostError) as error:
        change(config, "UserKnownHostsFile", "UserKnownHostsFile /dev/null\n  CertificateFile").run(HOST, ("true",))
    key = servers[0].key
    assert str(error.value) == (
        f"host far cannot be used over ssh (its host key {key.split()[0]} {transport_module.fingerprint(key)} is not "
        "in known_hosts, because this machine has not connected to the host before: compare it with what "
        "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub prints on the host; to accept it, run ssh once by hand and "
        "answer yes, or cpuft provision hosts with --accept-host-keys)"
    )


def test_a_user_without_a_key_is_told_how_to_make_one(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with pytest.raises(HostError) as error:
        change(config, "IdentityFile", "IdentityFile /nowhere\n  CertificateFile").run(HOST, ("true",))
    assert error.value.kind == transport_module.LOGIN_REFUSED
    assert str(error.value) == (
        "host far cannot be used over ssh (this user has no ssh key: ~/.ssh has no id_ed25519, id_ecdsa or id_rsa, and "
        "no agent has one: make a key with ssh-keygen -t ed25519, then put it on the host with ssh-copy-id far)"
    )


def test_a_changed_key_has_its_kind(config: Path, servers: tuple[Server, Server, Path]) -> None:
    host, bastion, _ = servers
    config.with_name("known_hosts").write_text(f"[127.0.0.1]:{host.port} {bastion.key}\n")
    with pytest.raises(HostError) as error:
        SshTransport(str(config)).run(HOST, ("true",))
    assert (error.value.kind, error.value.host) == (transport_module.KEY_CHANGED, "far")


@pytest.mark.parametrize(
    "lines, accepts",
    [
        ("[127.0.0.1]:* KEY", True),
        ("node?,[127.* KEY", True),
        ("*,!node1 KEY", True),
        ("*,!*127* KEY", False),
        ("node* KEY", False),
        ("* KEY\n@revoked node* KEY", True),
        ("* KEY\n@revoked * KEY", False),
    ],
)
def test_a_key_may_be_known_to_all_users_and_by_a_pattern_or_be_revoked(
    lines: str, accepts: bool, config: Path, servers: tuple[Server, Server, Path]
) -> None:
    """As the administrators of a cluster write /etc/ssh/ssh_known_hosts. OpenSSH's client decides in the same way."""
    shared = config.with_name("ssh_known_hosts")
    shared.write_text(lines.replace("KEY", servers[0].key) + "\n")
    config.with_name("known_hosts").unlink()
    transport = change(config, "/dev/null", str(shared))
    command = (*transport.command_prefix(HOST), "true")
    assert (subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0) == accepts
    with nullcontext() if accepts else pytest.raises(HostError, match="is not in known_hosts"):
        assert transport.run(HOST, ("echo", "in")).output == "in\n"


def test_a_known_key_is_found_among_those_of_many_hosts(config: Path, servers: tuple[Server, Server, Path]) -> None:
    """By its plain or hashed name. Of two keys of a type, the first one counts; lines for others do not matter."""
    host, bastion, _ = servers
    known, name = config.with_name("known_hosts"), f"[127.0.0.1]:{host.port}"
    others = (
        "".join(f"10.0.0.{n},node{n} {bastion.key}\n" for n in range(100)) + f"{name} ssh-ed25519 broken\n# {name}\n"
    )
    known.write_text(f"{others}node,{name} {host.key}\n{name} {bastion.key}\n@revoked {name} {bastion.key}\n")
    assert SshTransport(str(config)).run(HOST, ("echo", "in")).output == "in\n"
    known.write_text(f"{others}{name} {bastion.key}\n{name} {host.key}\n")
    with pytest.raises(HostError) as error:
        SshTransport(str(config)).run(HOST, ("true",))
    assert error.value.kind == transport_module.KEY_CHANGED
    known.write_text(f"{others}{name} {host.key}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], capture_output=True, timeout=20)
    assert f"{name} {host.key}" not in known.read_text()
    assert SshTransport(str(config)).run(HOST, ("echo", "in")).output == "in\n"


def test_a_server_that_is_too_busy_for_the_key_exchange_refuses_no_login(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_config, "CONNECT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"SSH-2.0-busy\r\n")
                while connection.recv(1000):
                    pass

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(HostError) as error:
            SshTransport(str(config)).run(Host("far", port=listener.getsockname()[1]), ("true",))
        thread.join(10)
    assert error.value.kind == transport_module.TIMED_OUT


def test_a_host_that_accepts_connections_and_says_nothing_is_not_tried_again(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a frozen host does. One beyond its MaxStartups, which ends connections, is tried again."""
    monkeypatch.setattr(ssh_config, "CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        host = Host("far", port=frozen.getsockname()[1])
        with pytest.raises(HostError, match="no answer in") as error:
            SshTransport(str(config)).run(host, ("true",))
        assert error.value.kind == transport_module.TIMED_OUT
        frozen.setblocking(False)
        frozen.accept()
        with pytest.raises(BlockingIOError):
            frozen.accept()


def test_a_command_that_does_not_end_is_given_up(config: Path) -> None:
    with pytest.raises(HostError, match=r"no answer in 1 s") as error:
        SshTransport(str(config)).run(HOST, ("sleep", "60"), seconds=1.0)
    assert error.value.kind == transport_module.TIMED_OUT


class SlowToStart(paramiko.ServerInterface):
    """A server that lets everybody in, and does not answer when it is asked to run a command."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def check_auth_none(self, username: str) -> int:
        return paramiko.common.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.common.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        self.is_over.wait(30)
        return False


def test_a_server_that_does_not_start_the_command_is_given_up() -> None:
    here, there = socket.socketpair()
    slow = SlowToStart()
    with paramiko.Transport(there) as server, paramiko.Transport(here) as link:
        server.add_server_key(paramiko.ECDSAKey.generate())
        server.start_server(event=threading.Event(), server=slow)
        link.connect()
        link.auth_none("me")
        client = paramiko.SSHClient()
        vars(client)["_transport"] = link
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            transport_module._run_in_session(client, "true", b"", 1.0)
        assert 1.0 <= time.monotonic() - begun < 15
        slow.is_over.set()


class Breaking(SlowToStart):
    """A server on which a command ends without an exit code, because the connection breaks."""

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        threading.Timer(0.2, channel.close).start()
        return True


def test_a_command_without_an_exit_code_gave_no_answer() -> None:
    here, there = socket.socketpair()
    with paramiko.Transport(there) as server, paramiko.Transport(here) as link:
        server.add_server_key(paramiko.ECDSAKey.generate())
        server.start_server(event=threading.Event(), server=Breaking())
        link.connect()
        link.auth_none("me")
        client = paramiko.SSHClient()
        vars(client)["_transport"] = link
        with pytest.raises(HostError) as error, transport_module._raise_host_errors(HOST):
            transport_module._run_in_session(client, "true", b"", 20.0)
    assert (error.value.kind, error.value.is_transient) == (transport_module.UNREACHABLE, True)
    assert "the connection broke while a command ran there" in str(error.value)


def test_a_command_whose_session_is_killed_gave_no_answer(config: Path) -> None:
    with pytest.raises(HostError, match="the connection broke while a command ran there"):
        SshTransport(str(config)).run(HOST, ("sh", "-c", "echo said; kill -9 $PPID; sleep 5"))


def test_a_server_that_does_not_speak_ssh_is_an_error(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuft.hosts.ssh_config.CONNECT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(HostError):
            SshTransport(str(config)).run(Host("far", port=port), ("true",), seconds=1.0)


def test_a_name_that_dns_does_not_allow_is_an_unreachable_host() -> None:
    transport, host = SshTransport(here=""), Host("[" * 70)
    assert not SshTransport().is_here(host)
    with pytest.raises(HostError, match="its name is not a valid host name") as raised:
        transport.run(host, ("true",))
    assert raised.value.kind == transport_module.UNREACHABLE


def test_every_host_that_fails_is_named() -> None:
    def fail(name: str) -> str:
        raise CpuftError(f"{name} is off")

    with pytest.raises(CpuftError, match="a is off; b is off") as error:
        map_hosts(fail, ("a", "b"))
    assert not error.value.is_transient


@pytest.mark.parametrize(
    "kinds, passes",
    [
        ((transport_module.UNREACHABLE, transport_module.TIMED_OUT), True),
        ((transport_module.UNREACHABLE, transport_module.KEY_CHANGED), False),
        ((transport_module.LOGIN_REFUSED, transport_module.LOGIN_REFUSED), False),
        ((transport_module.KEY_UNKNOWN, transport_module.KEY_UNKNOWN), False),
    ],
)
def test_an_unreachable_host_may_be_tried_again_and_one_that_refuses_may_not(
    kinds: tuple[str, str], passes: bool
) -> None:
    def fail(kind: str) -> str:
        raise HostError("a", kind, "so it is")

    with pytest.raises(CpuftError) as error:
        map_hosts(fail, kinds)
    assert error.value.is_transient == passes


def test_kept_sessions_log_in_once(config: Path) -> None:
    """Once more after a session has failed."""
    transport = SshTransport(str(config))

    def find_session() -> str:
        return transport.run(HOST, ("sh", "-c", 'echo "$SSH_CONNECTION"')).output

    with transport.keep_sessions():
        first = find_session()
        assert find_session() == first
        with pytest.raises(HostError, match="no answer in 1 s"):
            transport.run(HOST, ("sleep", "60"), seconds=1.0)
        second = find_session()
        assert find_session() == second != first
        # So is one that the host has ended meanwhile.
        transport.run(HOST, ("sh", "-c", "setsid sh -c 'sleep 0.2; kill $0' $PPID >&- 2>&- <&- &"))
        client, end = transport.sessions.open[HOST][0], time.monotonic() + 10
        while transport_module._is_active(client) and time.monotonic() < end:
            time.sleep(0.05)
        third = find_session()
        assert find_session() == third != second
    assert find_session() not in (first, second)
    assert transport.sessions.open == {}


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("", ()),
        ("none", ()),
        ("b", (Host("b"),)),
        ("me@b:2222, c", (Host("b", port=2222, user="me"), Host("c"))),
        ("ssh://me@b", (Host("b", user="me"),)),
    ],
)
def test_jumps(text: str, hosts: tuple[Host, ...]) -> None:
    assert parse_jumps(text, "far") == hosts


def test_jumps_that_are_none() -> None:
    with pytest.raises(CpuftError, match="names no host"):
        parse_jumps("b:x", "far")


def test_the_host_key_is_read_without_a_login(servers: tuple[Server, Server, Path], config: Path) -> None:
    host, _, _ = servers
    assert transport_module.scan_host_key(HOST, str(config)) == host.key
    listed = subprocess.run(["ssh-keygen", "-lf", "-"], input=host.key, capture_output=True, text=True, timeout=20)
    assert transport_module.fingerprint(host.key) == listed.stdout.split()[1]


def test_hosts_that_are_off_or_frozen_are_unreachable(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of a frozen host accepts connections, and its sshd sends nothing."""
    monkeypatch.setattr(ssh_config, "CONNECT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        others = f"Host off\n  Port 9\nHost frozen\n  Port {frozen.getsockname()[1]}\n"
        transport = change(config, "Host far\n", f"{others}Host far\n")
        change(config, "IdentityFile", "IdentityFile /dev/null\n  CertificateFile")
        assert transport.find_unreachable(("off", "frozen")) == {"off", "frozen"}
        monkeypatch.setattr(ssh_config, "CONNECT_SECONDS", 60.0)
        start = time.monotonic()
        assert transport.find_unreachable(("frozen",), 0.5) == {"frozen"}
        assert time.monotonic() - start < 5
        # One that would not let us in is there all the same.
        assert transport.find_unreachable(("localhost", "far")) == set()
        assert transport.unreachable == {"off", "frozen"}


def test_hosts_are_asked_at_the_port_of_the_hostfile(config: Path, servers: tuple[Server, Server, Path]) -> None:
    """Also "localhost" with a port, which is a container."""
    transport = change(config, f"Host far\n  Port {servers[0].port}\n", "")
    hosts = (Host("far", port=servers[0].port), Host("localhost", port=9))
    with pytest.raises(CpuftError, match="localhost"):
        gather_cluster(LaunchConfig(np=2), hosts, Access(transport))
    assert transport.find_unreachable(("far", "localhost")) == {"localhost"}


def test_a_host_that_is_cut_off_is_noticed_before_the_time_limit_for_a_busy_one(config: Path) -> None:
    """A full queue of connections drops every SYN packet, as a cut cable does."""
    with socket.socket() as full, ExitStack() as callers:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        transport = change(config, "Host far\n", f"Host cut\n  Port {full.getsockname()[1]}\nHost far\n")
        start = time.monotonic()
        assert transport.find_unreachable(("cut",), 9.0) == {"cut"}
        assert time.monotonic() - start < 8
