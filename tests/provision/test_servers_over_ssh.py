"""Servers over ssh: simulated hosts that each have a disk of their own for what is installed."""

import base64
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.conftest import wait_until
from tests.provision.simulated import Simulated, list_states, needs_root, simulate_servers
from tests.system import imitate

pytestmark = needs_root
SECONDS_OF_SECOND_RUN = 10.0
NAME = "lab"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    with simulate_servers(tmp_path_factory.mktemp("servers")) as made:
        yield made


def words(cluster: Simulated, *more: str) -> list[str]:
    key = str(cluster.folder / "state" / cluster.name / "id_ed25519")
    hosts = ",".join(host.name for host in cluster.hosts)
    given = ["--hosts", hosts, "--name", NAME, "--user", "root", "--key", key, "--prefix", "/mnt/cpuft"]
    return ["provision", "hosts", *given, "--wheels", str(cluster.folder / "wheels"), *more]


def states(cluster: Simulated) -> list[object]:
    """List every file of this machine, and those files of the hosts that are not this machine's."""
    there = "find /mnt $HOME -printf '%p %m %T@ %s %l\\n' | sort"
    return [list_states(cluster.folder), *(cluster.on(index, there) for index in (1, 2))]


def own_places(cluster: Simulated) -> dict[str, str]:
    """Make temporary folders for everything that a command could write to by default."""
    for name in ("home", "cache", "tmp"):
        (cluster.folder / name).mkdir(exist_ok=True)
    folder = cluster.folder
    return {"HOME": f"{folder}/home", "XDG_CACHE_HOME": f"{folder}/cache", "TMPDIR": f"{folder}/tmp"}


def test_a_dry_run_changes_nothing_anywhere(cluster: Simulated) -> None:
    places = own_places(cluster)
    before = states(cluster)
    given = cluster.cpuft(*words(cluster, "--dry-run"), **places)
    assert (given.returncode, given.stderr) == (0, "")
    fetched = cluster.cpuft(*words(cluster, "--dry-run", "--wheels", ""), **places)
    assert (fetched.returncode, fetched.stderr) == (0, "")
    assert states(cluster) == before
    key = read_fingerprint(cluster, 1)
    for plan in (given, fetched):
        assert f"# {cluster.hosts[0].name} shows the host key ssh-ed25519 {key}: cpuft asks" in plan.stdout
        assert f"{cluster.folder}/state/{NAME}/known_hosts" in plan.stdout
    python = ".".join(platform.python_version_tuple()[:2])
    assert f"download wheels for Python {python} on {platform.machine()}" in fetched.stdout
    assert "push click" in given.stdout
    assert "push" not in fetched.stdout
    # This cpuft's own wheel has compiled files on Linux only, so that its name and the hashes may differ.
    of_mac = cluster.cpuft(*words(cluster, "--dry-run"), **places, **imitate("darwin"))
    own = r"cpuft-[\w.]+-py3-none-\w+\.whl|\b[0-9a-f]{32,64}\b|\S+/bin/python\b"
    assert re.sub(own, "OWN", of_mac.stdout) == re.sub(own, "OWN", given.stdout) != ""


def read_fingerprint(cluster: Simulated, index: int) -> str:
    """Return the fingerprint of a host's own key, as ssh-keygen prints it on the host."""
    return cluster.on(index, "ssh-keygen -lf /run/cpuft/host_key").split()[1]


@pytest.mark.proof
def test_printed_plans_make_the_cluster_when_run_by_hand(cluster: Simulated) -> None:
    """Plans are printed and run until nothing is missing; then the printed plan of `down` removes everything."""
    places = own_places(cluster)
    environ = dict(os.environ) | places
    for _ in range(2):
        plan = cluster.cpuft(*words(cluster, "--dry-run"), **places).stdout
        done = subprocess.run(["bash"], input=plan, env=environ, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
    assert cluster.cpuft(*words(cluster, "--dry-run"), **places).stdout == "#!/usr/bin/env bash\nset -euo pipefail\n"
    before = states(cluster)
    assert cluster.cpuft("provision", "diff", NAME, **places).stdout == f"cluster {NAME} is as it was asked for\n"
    assert cluster.cpuft("provision", "status", NAME, **places).returncode == 0
    down = cluster.cpuft("provision", "down", NAME, "--dry-run", **places)
    assert states(cluster) == before
    assert cluster.on(1, "test -x /mnt/cpuft/env/bin/cpuft; echo $?") == "0"
    subprocess.run(["bash"], input=down.stdout, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert cluster.on(2, 'ls /mnt; ls "$HOME/.ssh" 2>/dev/null || true') == ""
    assert not (cluster.folder / "state" / NAME).exists()


def test_an_unknown_host_key_is_not_accepted_without_asking(cluster: Simulated) -> None:
    done = cluster.cpuft(*words(cluster))
    assert done.returncode == 2
    assert "was not accepted" in done.stderr
    assert cluster.on(1, "ls /mnt") == ""


def test_a_mac_makes_and_removes_a_cluster(cluster: Simulated) -> None:
    mac, state = imitate("darwin"), cluster.folder / "state" / "mac"
    made = cluster.cpuft(*words(cluster, "--accept-host-keys", "--name", "mac", "--prefix", "/mnt/mac"), **mac)
    assert made.returncode == 0, made.stderr
    for index in (1, 2):
        assert cluster.on(index, "test -x /mnt/mac/env/bin/cpuft; echo $?") == "0"
    assert cluster.cpuft("provision", "diff", "mac", **mac).stdout == "cluster mac is as it was asked for\n"
    assert cluster.cpuft("provision", "status", "mac", **mac).stdout.count("  up, ") == 2
    down = cluster.cpuft("provision", "down", "mac", **mac)
    assert (down.returncode, state.exists()) == (0, False), down.stderr
    for index in (1, 2):
        assert cluster.on(index, "ls /mnt/mac 2>/dev/null || true") == ""


@pytest.mark.parametrize("seconds", [pytest.param(0.8, marks=pytest.mark.proof), 1.6])
def test_the_next_run_completes_what_a_killed_run_began(cluster: Simulated, seconds: float) -> None:
    command = [sys.executable, "-m", "cpuft", *words(cluster, "--accept-host-keys")]
    environ = {**os.environ, "CPUFT_STATE": str(cluster.folder / "state")}
    for index in (1, 2):
        cluster.on(index, "rm -rf /mnt/cpuft")
    with subprocess.Popen(command, cwd=cluster.folder, env=environ, stderr=subprocess.DEVNULL) as process:
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
    done = cluster.cpuft(*words(cluster, "--accept-host-keys"))
    assert done.returncode == 0, done.stderr
    for index in (1, 2):
        assert cluster.on(index, "test -x /mnt/cpuft/env/bin/cpuft; echo $?") == "0"


def test_a_head_host_that_cannot_log_in_to_the_others_is_named(cluster: Simulated) -> None:
    cluster.accept_own_keys(2, "/etc/ssh/keys/%u")
    head, other = (host.name for host in cluster.hosts)
    said = (
        f"no rank can start on {other}, because the head host {head} cannot log in there (root@{other}: Permission "
        "denied (publickey).): see the reason"
    )
    for command in (words(cluster, "--accept-host-keys"), ["provision", "diff", NAME]):
        done = cluster.cpuft(*command)
        assert done.returncode == 2
        assert said in done.stderr
    checked = cluster.cpuft("doctor", "--cluster", NAME)
    assert "CPUFT-005" in checked.stdout
    assert "AuthorizedKeysFile" in checked.stdout
    cluster.accept_own_keys(2)
    assert cluster.cpuft(*words(cluster)).returncode == 0


def test_the_second_run_does_nothing_and_is_quick(cluster: Simulated) -> None:
    start = time.monotonic()
    done = cluster.cpuft(*words(cluster))
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - start < SECONDS_OF_SECOND_RUN
    assert cluster.cpuft("provision", "diff", NAME).stdout == f"cluster {NAME} is as it was asked for\n"
    assert (cluster.folder / "hostfiles" / NAME).read_text().splitlines()[1:] == [h.name for h in cluster.hosts]


def test_drift_is_shown_by_host_and_repaired(cluster: Simulated) -> None:
    cluster.on(2, "rm /mnt/cpuft/env/stamp")
    assert cluster.cpuft("provision", "diff", NAME).stdout.startswith(f"{cluster.hosts[1].name}: install")
    assert cluster.cpuft(*words(cluster)).returncode == 0
    assert cluster.cpuft("provision", "diff", NAME).returncode == 0


def test_a_full_disk_is_named_and_the_other_host_unharmed(cluster: Simulated) -> None:
    cluster.on(2, "rm -rf /mnt/cpuft; mount -t tmpfs -o size=4m tmpfs /mnt")
    done = cluster.cpuft(*words(cluster))
    cluster.on(2, "umount /mnt")
    assert done.returncode == 2
    assert f"{cluster.hosts[1].name}: " in done.stderr.splitlines()[-1]
    assert "make room" in done.stderr.splitlines()[-1]
    assert cluster.on(1, "test -x /mnt/cpuft/env/bin/cpuft; echo $?") == "0"
    assert cluster.cpuft(*words(cluster)).returncode == 0


def named(cluster: Simulated, *more: str) -> str:
    """Return the last line of a refused run, which names the second host only; the first host is unchanged."""
    done = cluster.cpuft(*words(cluster, *more))
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert cluster.hosts[1].name in line
    assert cluster.hosts[0].name not in line
    assert cluster.on(1, "test -x /mnt/cpuft/env/bin/cpuft; echo $?") == "0"
    return line


def test_an_unreachable_host_is_named(cluster: Simulated) -> None:
    cluster.cpuft("provision", "local", "--name", cluster.name, "cut", "2")
    try:
        assert "cannot be used over ssh" in named(cluster)
        status = cluster.cpuft("provision", "status", NAME).stdout.splitlines()
    finally:
        cluster.cpuft("provision", "local", "--name", cluster.name, "join", "2")
    assert "  up, " in status[1]
    assert "  down: " in status[2]


def test_a_wrong_key_is_named(cluster: Simulated) -> None:
    # The host itself puts its keys back, once there is a file: nobody else can log in meanwhile.
    away, back = "mv /run/cpuft/authorized_keys /run/cpuft/away", "mv /run/cpuft/away /run/cpuft/authorized_keys"
    enough = cluster.folder / "enough"
    cluster.on(2, f"{away}; (until [ -e {enough} ]; do sleep 0.1; done; {back}) >/dev/null 2>&1 </dev/null &")
    try:
        assert "put your public key there with ssh-copy-id" in named(cluster)
    finally:
        enough.touch()
    wait_until(lambda: cluster.cpuft("provision", "diff", NAME).returncode == 0)


def test_a_wrong_python_is_named(cluster: Simulated) -> None:
    fake = "printf '#!/bin/sh\\necho 3.9.2\\n' >/usr/local/bin/python3; chmod 755 /usr/local/bin/python3"
    cluster.on(2, f"mount -t tmpfs tmpfs /usr/local/bin; {fake}")
    try:
        assert "Python is 3.9.2, and cpuft needs 3.10 or newer" in named(cluster)
    finally:
        cluster.on(2, "umount /usr/local/bin")


def test_a_changed_host_key_is_refused(cluster: Simulated) -> None:
    known = cluster.folder / "state" / NAME / "known_hosts"
    text = known.read_text()
    address = cluster.hosts[1].name
    blob = base64.b64decode(text.splitlines()[1].split()[2])
    other = base64.b64encode(blob[:-1] + bytes([blob[-1] ^ 1])).decode()
    known.write_text(f"{text.splitlines()[0]}\n{address} ssh-ed25519 {other}\n")
    done = cluster.cpuft(*words(cluster, "--accept-host-keys"))
    known.write_text(text)
    assert done.returncode == 2
    assert f"host {address} cannot be used over ssh" in done.stderr
    assert "does not match" in done.stderr


def test_down_removes_what_was_installed(cluster: Simulated) -> None:
    assert cluster.cpuft("provision", "down", NAME).returncode == 0
    for index in (1, 2):
        assert cluster.on(index, 'ls /mnt; ls "$HOME/.ssh" 2>/dev/null || true') == ""
    assert not (cluster.folder / "state" / NAME).exists()
    assert not (cluster.folder / "hostfiles" / NAME).exists()
