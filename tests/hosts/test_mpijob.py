"""The pods of an MPIJob: their hostfile, and real ssh servers with the job's key and with another one."""

from __future__ import annotations

import os
import pwd
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cpuft.config.launch import LaunchConfig
from cpuft.errors import CpuftError
from cpuft.hosts import ssh_config
from cpuft.hosts.cluster import find_access, read_hosts
from cpuft.hosts.hostfile import Host, find_job_hostfile
from cpuft.hosts.mpijob import PORT, MpiJobTransport, find_keys, sshd_command, write_ssh_config
from cpuft.launch.rank_variables import user_variables
from tests.conftest import run_shell
from tests.hosts.test_transport import Server, make_key, serve

LAUNCHER = {"K_MPI_JOB_ROLE": "launcher"}
HOST = Host("j-worker-0.j.nlp.svc")


@pytest.mark.parametrize(
    ("environ", "hostfile"),
    [
        ({}, ""),
        ({"I_MPI_HYDRA_HOST_FILE": "/a"}, ""),
        ({"K_MPI_JOB_ROLE": "worker", "I_MPI_HYDRA_HOST_FILE": "/a"}, ""),
        (LAUNCHER, "/etc/mpi/hostfile"),
        (LAUNCHER | {"I_MPI_HYDRA_HOST_FILE": "/a"}, "/a"),
        (LAUNCHER | {"HYDRA_HOST_FILE": "/b"}, "/b"),
        (LAUNCHER | {"OMPI_MCA_orte_default_hostfile": "/c", "HYDRA_HOST_FILE": ""}, "/c"),
    ],
)
def test_the_path_of_the_hostfile_comes_from_the_operators_variables(environ: dict[str, str], hostfile: str) -> None:
    assert find_job_hostfile(environ) == hostfile


@contextmanager
def told(**more: str) -> Iterator[None]:
    """As the operator tells a launcher."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (LAUNCHER | more).items():
            patch.setenv(name, value)
        yield


@pytest.mark.parametrize("line", ["j-worker-{}.j.nlp.svc:2\n", "j-worker-{}.j.nlp.svc slots=2\n"])
def test_a_launcher_takes_the_hosts_of_its_job(line: str, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text(line.format(0) + line.format(1))
    with told(I_MPI_HYDRA_HOST_FILE=str(tmp_path / "hostfile")):
        assert read_hosts(LaunchConfig()) == tuple(Host(f"j-worker-{number}.j.nlp.svc", 2) for number in (0, 1))


@pytest.mark.parametrize("own", [LaunchConfig(hostfile="mine"), LaunchConfig(ssh_config="mine")])
def test_own_hosts_or_an_own_ssh_configuration_win(own: LaunchConfig, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with told():
        assert type(find_access(own).transport) is not MpiJobTransport


def test_variables_that_the_operator_sets_are_not_the_users() -> None:
    told = {"I_MPI_HYDRA_HOST_FILE": "/a", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "-o X=1", "I_MPI_PERHOST": "2"}
    users = {"I_MPI_DEBUG": "5", "OMP_NUM_THREADS": "2"}
    assert user_variables(LAUNCHER | told | users) == LAUNCHER | users
    assert user_variables(told | users) == told | users


@contextmanager
def serve_job(folder: Path) -> Iterator[tuple[Server, str]]:
    """A worker, and ssh's configuration of a pod that has the job's key."""
    make_key(folder / "client")
    with serve(folder / "worker", forwards=False) as server:
        keys = folder / "keys"
        keys.mkdir()
        (keys / "id_rsa").write_bytes((folder / "client").read_bytes())
        (keys / "id_rsa").chmod(0o644)  # as the operator gives it; ssh accepts only its copy
        (keys / "id_rsa.pub").write_text(f"{server.key} of the job\n")
        config = Path(write_ssh_config(keys, folder / "trust"))
        config.write_text(config.read_text().replace(f"Port {PORT}", f"Port {server.port}\n    HostName 127.0.0.1"))
        yield server, str(config)


@pytest.mark.real
def test_a_worker_is_known_by_the_jobs_key(tmp_path: Path) -> None:
    with serve_job(tmp_path) as (_, config):
        assert MpiJobTransport(config).run(HOST, ("echo", "a 0")).output == "a 0\n"
        assert not MpiJobTransport(config).is_here(HOST)
        make_key(tmp_path / "other")
        (tmp_path / "trust" / "known_hosts").write_text(f"mpijob {(tmp_path / 'other.pub').read_text()}")
        with pytest.raises(CpuftError) as refusal:
            MpiJobTransport(config, deadline=time.monotonic() + 60).run(HOST, ("true",))
    said = (
        f"host {HOST.name} does not show the job's key as its host key: start workers by python -m cpuft.hosts.mpijob"
    )
    assert str(refusal.value) == f"{said}, or name your own --ssh-config"


def test_unreachable_pods_are_retried_until_the_deadline(tmp_path: Path) -> None:
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGx0uLAkZ4lSbDxZlUmXo8oWDvKPIDUcBTXIyVK7vAVS"
    (tmp_path / "id_rsa.pub").write_text(key)
    (tmp_path / "id_rsa").touch()
    config = write_ssh_config(tmp_path, tmp_path / "trust")
    Path(config).write_text("Host *\n    HostName 127.0.0.1\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = Host(HOST.name, port=server.getsockname()[1])
    for deadline, least in ((0.0, 0.0), (time.monotonic() + 0.5, 0.5)):
        start = time.monotonic()
        with pytest.raises(CpuftError, match="cannot be used over ssh"):
            MpiJobTransport(config, deadline=deadline).run(closed, ("true",))
        assert time.monotonic() - start >= least


def test_a_pod_is_recognized_by_the_first_part_of_its_name() -> None:
    own = socket.gethostname()
    assert [
        MpiJobTransport().is_here(Host(name)) for name in (f"{own}.j.nlp.svc", "localhost", f"{own}x.j.nlp.svc")
    ] == [
        True,
        True,
        False,
    ]


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "id_rsa.pub").write_text("ecdsa-sha2-nistp521 AAAA\n")
    (tmp_path / "id_rsa").touch()
    (tmp_path / "trust").mkdir()
    (tmp_path / "trust").chmod(0o777)
    with pytest.raises(CpuftError, match=r"can be written to by other users .* restart the pod$"):
        write_ssh_config(tmp_path, tmp_path / "trust")


def test_a_worker_without_a_key_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run_shell(f"HOME={tmp_path} exec {sys.executable} -m cpuft.hosts.mpijob")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("cpuft: error: this pod has no key of an MPIJob (")
    assert done.stderr.endswith(f"set sshAuthMountPath to {tmp_path}/.ssh, or name --ssh-config\n")


def test_the_job_s_key_is_found_where_a_manifest_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("cpuft.hosts.mpijob._KEYS", (f"{tmp_path}/keys", "~/.ssh"))
    assert find_keys() == tmp_path / ".ssh"
    (tmp_path / "keys").mkdir()
    assert find_keys() == tmp_path / "keys"


def test_ssh_gets_a_copy_of_the_key_that_nobody_else_can_read(tmp_path: Path) -> None:
    make_key(tmp_path / "id_rsa")
    (tmp_path / "id_rsa").chmod(0o644)
    write_ssh_config(tmp_path, tmp_path / "trust")
    assert (tmp_path / "trust/id_rsa").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "trust/id_rsa").read_text() == (tmp_path / "id_rsa").read_text()
    public = " ".join((tmp_path / "id_rsa.pub").read_text().split()[:2])
    assert (tmp_path / "trust/authorized_keys").read_text() == f"{public}\n"


def test_a_user_without_a_name_gets_one_where_the_image_lets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = tmp_path / "passwd"

    def look_up(uid: int) -> pwd.struct_passwd:
        lines = users.read_text().splitlines() if users.exists() else []
        for name, _, number, *rest in (line.split(":") for line in lines):
            if int(number) == uid:
                return pwd.struct_passwd((name, "x", uid, int(rest[0]), *rest[1:]))
        raise KeyError(uid)

    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    monkeypatch.setattr(pwd, "getpwuid", look_up)
    monkeypatch.setattr(ssh_config, "_EXTRA_USERS", str(tmp_path / "none/passwd"))
    with pytest.raises(CpuftError, match="user 4000000 has none: add one"):
        ssh_config.find_user()
    monkeypatch.setattr(ssh_config, "_EXTRA_USERS", str(users))
    assert [ssh_config.find_user() for _ in range(2)] == ["cpuft", "cpuft"]
    assert users.read_text() == "cpuft:x:4000000:4000000::/var/tmp:/bin/sh\n"


def test_only_root_s_sshd_uses_pam(monkeypatch: pytest.MonkeyPatch) -> None:
    for uid, has in ((0, False), (1000, True)):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        assert ("-oUsePAM=no" in sshd_command(Path("/a"))) == has


def test_sshd_accepts_its_options(tmp_path: Path) -> None:
    """And says which it has then, the first of each name."""
    make_key(tmp_path / "id_rsa")
    if_root = f"mkdir -p /run/sshd; {' '.join(sshd_command(tmp_path))} -T -f /dev/null"
    done = run_shell(if_root.replace(" -D ", " "))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.lower().splitlines()
    keys = f"authorizedkeysfile {tmp_path}/authorized_keys".lower()
    assert {f"port {PORT}", f"hostkey {tmp_path}/id_rsa".lower(), "strictmodes no", keys} <= {*lines}
    assert [line for line in lines if line.startswith("hostkey ")] == [f"hostkey {tmp_path}/id_rsa".lower()]
