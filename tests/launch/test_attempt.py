"""Runs on a real cluster of simulated hosts, including hosts that fail."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.config.launch import LaunchConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, Interrupted
from cpuft.hosts.cluster import Cluster, gather_cluster
from cpuft.hosts.mpi_implementations import MpiImplementation
from cpuft.hosts.transport import SshTransport
from cpuft.launch.attempt import run_attempt, run_remotely
from cpuft.launch.inputs import make_bundle
from cpuft.launch.plan import Job, plan_run
from cpuft.launch.results import HeadHostLostError
from cpuft.launch.resume import ResumedRun
from cpuft.launch.run_state import begin_state, read_state
from cpuft.launch.stop_request import StopRequest
from cpuft.plans import RunPlan, Step
from tests.provision.simulated import Simulated, needs_root, simulate, take_snapshot

pytestmark = needs_root
ROOT = Path(__file__).parents[2]
SECONDS_TO_MAKE = 15.0
SCRIPT = "import os, socket\nprint(os.environ['RANK'], socket.gethostname(), os.environ['MASTER_ADDR'])\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    folder = tmp_path_factory.mktemp("cluster")
    before = take_snapshot(folder)
    start = time.monotonic()
    with simulate(folder, "--nodes", "3", "--cores-per-node", "1.5", "--net", "1gbit") as made:
        assert time.monotonic() - start < SECONDS_TO_MAKE
        yield made
    assert take_snapshot(folder) == before


def repair(cluster: Simulated) -> None:
    words = ("--name", cluster.name, "--nodes", "3", "--cores-per-node", "1.5", "--net", "1gbit")
    assert cluster.cpuft("provision", "local", *words).returncode == 0


def test_the_second_run_plans_nothing(cluster: Simulated) -> None:
    words = ("--name", cluster.name, "--nodes", "3", "--cores-per-node", "1.5", "--net", "1gbit", "--dry-run")
    assert cluster.cpuft("provision", "local", *words).stdout == "#!/usr/bin/env bash\nset -euo pipefail\n"


def test_hosts_are_isolated_from_each_other(cluster: Simulated) -> None:
    assert [cluster.on(index, "hostname") for index in (1, 2, 3)] == [f"{cluster.name}-{i}" for i in (1, 2, 3)]
    assert cluster.on(2, "cat /proc/1/comm") == "sshd"
    assert "rate 1Gbit" in cluster.on(2, "tc qdisc show dev eth0")
    assert cluster.on(2, "ls /dev/shm") == ""
    assert "15000" in cluster.on(2, "cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null; true")


def test_the_head_host_can_log_in_to_all_hosts(cluster: Simulated) -> None:
    config = cluster.ssh_config
    for index in (1, 2, 3):
        assert cluster.on(1, f"ssh -F {config} {cluster.name}-{index} hostname") == f"{cluster.name}-{index}"


def test_no_password_opens_a_host(cluster: Simulated) -> None:
    options = ["-o", "PubkeyAuthentication=no", "-o", "NumberOfPasswordPrompts=0"]
    command = ["ssh", "-F", cluster.ssh_config, *options, cluster.hosts[0].name, "true"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=20).stderr
    assert "Permission denied (publickey)" in said


@pytest.mark.parametrize("fault, seen", [("kill", "down"), ("pause", "paused"), ("cut", "cut off")])
def test_a_fault_is_seen_and_repaired(cluster: Simulated, fault: str, seen: str) -> None:
    assert cluster.cpuft("provision", "local", "--name", cluster.name, fault, "3").returncode == 0
    lines = cluster.cpuft("provision", "status", cluster.name).stdout.splitlines()
    assert seen in lines[-1]
    assert cluster.cpuft("provision", "diff", cluster.name).returncode == 1
    repair(cluster)
    assert cluster.cpuft("provision", "diff", cluster.name).returncode == 0
    assert cluster.on(3, "hostname") == f"{cluster.name}-3"


def test_a_script_runs_on_every_host_and_its_output_comes_back(cluster: Simulated) -> None:
    script = cluster.folder / "where.py"
    script.write_text(SCRIPT)
    words = ("launch", "--np", "3", "--independent", "--cluster", cluster.name, "--run-dir", "run", "--", str(script))
    done = cluster.cpuft(*words)
    assert done.returncode == 0, done.stderr
    master = cluster.hosts[0].name
    assert done.stdout.splitlines()[0] == f"0 {cluster.name}-1 {master}"
    told = sorted(path.read_text() for path in (cluster.folder / "run" / "logs").glob("rank-*.out"))
    assert told == [f"{rank} {cluster.name}-{rank + 1} {master}\n" for rank in range(3)]
    work = Cluster((), (), MpiImplementation("mpirun", "intel"), works_remotely=True).work_dir(
        str(cluster.folder / "run")
    )
    assert not Path(work).parent.exists()


TOKENS = """
import glob, os, time
names = ("HF_TOKEN", "OPENAI_API_KEY", "CPUFT_RUN_KEY")
def shows(path):
    try:
        return b"hunter" in open(path, "rb").read()
    except OSError:  # a folder, or ended meanwhile
        return False
end = time.monotonic() + 20
while any(map(shows, glob.glob("/var/tmp/cpuft-*/*.sent/*"))) and time.monotonic() < end:
    time.sleep(0.05)  # the other rank may not have begun
places = [*glob.glob("/proc/[0-9]*/cmdline"), *glob.glob("/var/tmp/cpuft-*/*.sent/*")]
print(os.environ["RANK"], [len(os.environ.get(name, "")) for name in names], list(filter(shows, places)))
"""


def find_sent(cluster: Simulated) -> list[str]:
    return [cluster.on(index, "find /var/tmp -name '*.sent' | sort") for index in (1, 2)]


def test_tokens_for_training_reach_all_hosts_and_other_secrets_none(cluster: Simulated) -> None:
    script = cluster.folder / "tokens.py"
    script.write_text(TOKENS)
    before = find_sent(cluster)  # Hosts share this machine's /var/tmp, where a test that was killed may have left some.
    words = (
        "launch",
        "--np",
        "2",
        "--independent",
        "--cluster",
        cluster.name,
        "--run-dir",
        "tokens",
        "--",
        str(script),
    )
    secrets = {"HF_TOKEN": "hunter2\nhunter3", "OPENAI_API_KEY": "hunter4"}
    plan = cluster.cpuft(*words[:-2], "--dry-run", *words[-2:], **secrets)
    assert "HF_TOKEN" in plan.stdout, plan.stderr
    done = cluster.cpuft(*words, **secrets)
    told = sorted(path.read_text() for path in (cluster.folder / "tokens" / "logs").glob("rank-*.out"))
    assert told == ["0 [15, 0, 64] []\n", "1 [15, 0, 64] []\n"], done.stderr
    kept = [path.read_text() for path in (cluster.folder / "tokens").rglob("*") if path.is_file()]
    assert "hunter" not in plan.stdout + plan.stderr + done.stdout + done.stderr + "".join(kept)
    assert find_sent(cluster) == before
    # From the master itself, whose own ranks would inherit what mpirun has.
    (cluster.folder / "own").write_text(f"export CPUFT_STATE=state OPENAI_API_KEY=hunter4 HF_TOKEN={'hunter5' * 2}\n")
    lines = [f"cd {cluster.folder}", ". ./own"]
    there = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "cpuft", *words[:-3], "there", *words[-2:])
    assert cluster.on(1, "\n".join([*lines, shlex.join(there)])).startswith("0 [14, 0, 64] []\n")
    assert (cluster.folder / "there" / "logs" / "rank-1.out").read_text() == "1 [14, 0, 64] []\n"
    assert find_sent(cluster) == before


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("is_lost", [False, True])
def test_an_attempt_reports_the_signal_that_asked_its_ranks_to_end(
    is_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the head host is lost before they end."""

    def run_as_head_host(*given: object) -> int:
        request = given[-1]
        assert isinstance(request, StopRequest)
        assert request.handle_signal(signal.SIGUSR1)
        if is_lost:
            raise HeadHostLostError("the head host does not answer: look at it")
        return 75

    monkeypatch.setattr("cpuft.launch.attempt.run_as_head_host", run_as_head_host)
    request, here = StopRequest(0.0), gather_cluster(LaunchConfig())
    with suppress(HeadHostLostError):
        code = run_attempt(RunPlan(), str(tmp_path / "run"), here, 0.0, print, request)
        assert (code, is_lost) == (75, False)
    assert request.signal_number == signal.SIGUSR1


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_launch_whose_inputs_cannot_be_sent_may_be_repeated(
    is_resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head host, here this machine, does not keep the new folder. That of a resumed run stays."""
    monkeypatch.setattr("cpuft.hosts.cluster.WORK_ROOT", str(tmp_path))
    here = gather_cluster(LaunchConfig(), is_on_host_disk=True)
    run_dir, send = str(tmp_path / "run"), Step("send rows.csv to localhost", ("false",))
    resumed = ResumedRun(run_dir) if is_resumed else None
    plan = plan_run(Job(run_dir, LaunchConfig(np=1), TrainConfig(), ("true",)), here, resumed)
    for _ in range(2):
        state = begin_state(here, run_dir, plan.owner)
        with pytest.raises(CpuftError, match=r"send rows\.csv to localhost: failed"):
            run_remotely(replace(plan, inputs=((send,),)), run_dir, state, here, 0.0, print, StopRequest())
    assert Path(here.work_dir(run_dir)).parent.exists() == is_resumed
    assert Path(here.folder).is_relative_to(tmp_path)


def test_a_signal_ends_the_launch_also_if_the_head_host_is_lost_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of the head host alone would lead to a restart. It may have the only record, so the state here stays."""
    monkeypatch.setattr("cpuft.hosts.cluster.WORK_ROOT", str(tmp_path))
    here = gather_cluster(LaunchConfig(), is_on_host_disk=True)
    run_dir, said = str(tmp_path / "run"), list[str]()
    plan = plan_run(Job(run_dir, LaunchConfig(np=1), TrainConfig(), ("true",)), here)
    send, fetch = (Step("transfer", ("sh", "-c", script)) for script in ("kill -INT $PPID; sleep 60", "exit 255"))
    plan = replace(plan, inputs=((send,),), results=((fetch,), *plan.results[1:]))
    with pytest.raises(Interrupted):
        run_remotely(plan, run_dir, begin_state(here, run_dir, 1), here, 0.0, said.append, StopRequest())
    assert re.fullmatch("cpuft: the results .* could not be fetched .*; the run's record is in .*", said[-1])
    assert read_state(run_dir)


@pytest.fixture
def own_disks(cluster: Simulated) -> Iterator[tuple[str, ...]]:
    """Arguments of a launch on two hosts that share no files and have a /var/tmp of their own."""
    for index in (1, 2):
        cluster.on(index, "mount -t tmpfs -o mode=1777 tmpfs /var/tmp")
    (cluster.folder / "copy").write_text(f"{cluster.hosts[0].name}\n{cluster.hosts[1].name}\n")
    (cluster.folder / "alone").mkdir(exist_ok=True)
    (cluster.folder / "alone" / "script.py").write_text("print('mine')\n")
    words = (
        "launch",
        "--np",
        "2",
        "--independent",
        "--no-check",
        "--hostfile",
        "copy",
        "--ssh-config",
        cluster.ssh_config,
    )
    yield (*words, "--run-dir", "alone/run", "--", "alone/script.py")
    for index in (1, 2):
        cluster.on(index, "umount /var/tmp")


def test_a_script_that_another_user_planted_is_not_run(cluster: Simulated, own_disks: tuple[str, ...]) -> None:
    place = make_bundle((cluster.folder / "alone" / "script.py",), "/var/tmp/cpuft-0/inputs").remote_folder
    plant = f"mkdir -p {place}; echo \"print('planted')\" >{place}/script.py; chown -R 65534 /var/tmp/cpuft-0"
    cluster.on(2, plant)
    done = cluster.cpuft(*own_disks)
    said = f"host {cluster.hosts[1].name} has no safe folder for the files of the run: /var/tmp/cpuft-0 is no folder"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(f"cpuft: error: {said}"), done.stderr
    cluster.on(2, "mv /var/tmp/cpuft-0 /var/tmp/theirs")
    done = cluster.cpuft(*own_disks)
    assert (done.returncode, done.stdout.splitlines()[:1]) == (0, ["mine"]), done.stderr
    for index in (1, 2):
        found = cluster.on(index, "find /var/tmp -name theirs -prune -o -printf '%m %p\n' | sort -k 2 | tail -n +2")
        file = f"{place}/script.py"
        kept = [
            "700 /var/tmp/cpuft-0",
            "700 /var/tmp/cpuft-0/inputs",
            f"700 {place}",
            f"600 {place}.files",
            f"644 {file}",
        ]
        assert found.splitlines() == kept


def test_a_file_that_a_host_has_lost_is_sent_again(cluster: Simulated, own_disks: tuple[str, ...]) -> None:
    """systemd-tmpfiles removes single files from /var/tmp. The next launch also removes what is old."""
    place = make_bundle((cluster.folder / "alone" / "script.py",), "/var/tmp/cpuft-0/inputs").remote_folder
    old = f"/var/tmp/cpuft-0/inputs/{'a' * 24}"
    assert cluster.cpuft(*own_disks[:-3], "alone/first", *own_disks[-2:]).returncode == 0
    cluster.on(2, f"rm {place}/script.py; mkdir {old}; touch -d '31 days ago' {old} {place}")
    dry = cluster.cpuft("launch", "--dry-run", *own_disks[1:-3], "alone/again", *own_disks[-2:])
    assert dry.stdout.count("cpuft: send script.py to") == 1, dry.stderr
    done = cluster.cpuft(*own_disks[:-3], "alone/again", *own_disks[-2:])
    assert (done.returncode, done.stdout.splitlines()[:1]) == (0, ["mine"]), done.stderr
    assert cluster.on(2, f"ls {old.rpartition('/')[0]} {place}").split() == [
        *("/var/tmp/cpuft-0/inputs:", Path(place).name, f"{Path(place).name}.files"),
        *(f"{place}:", "script.py"),
    ]


def test_a_failing_script_gives_its_exit_code(cluster: Simulated) -> None:
    script = cluster.folder / "fails.py"
    script.write_text("import os, sys\nsys.exit(7 if os.environ['RANK'] == '1' else 0)\n")
    words = (
        "launch",
        "--np",
        "2",
        "--independent",
        "--max-restarts",
        "0",
        "--cluster",
        cluster.name,
        "--run-dir",
        "failed",
    )
    done = cluster.cpuft(*words, "--", str(script))
    assert done.returncode == 7
    assert f"rank 1 on {cluster.hosts[1].name} failed (exit code 7)" in done.stderr


@pytest.mark.parametrize("streams", [pytest.param("2>&1 | head -1", marks=pytest.mark.proof), "<&- >&- 2>&-"])
def test_a_remote_run_continues_if_its_output_is_not_read(cluster: Simulated, streams: str) -> None:
    script = cluster.folder / "talks.py"
    script.write_text(
        "import os, sys, time\n"
        "for number in range(40):\n"
        "    print('x' * 4096, flush=True)\n"
        "    print('y' * 4096, file=sys.stderr)\n"
        "    time.sleep(0.05)\n"
        "open(os.environ['CPUFT_RUN_DIR'] + '/end', 'w').close()\n"
    )
    run_dir = cluster.folder / f"unheard{len(streams)}"
    words = f"{sys.executable} -m cpuft launch --np 1 --cluster {cluster.name} --run-dir {run_dir} -- {script}"
    environ = {**os.environ, "CPUFT_STATE": str(cluster.folder / "state")}
    pipe = ["bash", "-o", "pipefail", "-c", f"{words} {streams}"]
    assert subprocess.run(pipe, cwd=cluster.folder, env=environ, timeout=100).returncode == 0
    assert (run_dir / "end").exists()


def test_an_interrupt_ends_the_ranks_on_all_hosts(cluster: Simulated) -> None:
    script = cluster.folder / "sleeps.py"
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(100)\n")
    words = ["launch", "--np", "2", "--cluster", cluster.name, "--run-dir", "stopped", "--", str(script)]
    command = [sys.executable, "-m", "cpuft", *words]
    environ = {**os.environ, "CPUFT_STATE": str(cluster.folder / "state")}
    with subprocess.Popen(command, cwd=cluster.folder, env=environ, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert (cluster.folder / "stopped" / "logs" / "rank-0.out").read_text() == "here\n"
    for index in (1, 2):
        assert "sleeps.py" not in cluster.on(index, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")


@pytest.mark.proof
def test_a_frozen_host_ends_the_run(cluster: Simulated) -> None:
    """The other rank times out after five seconds. mpirun alone would wait for the frozen host without limit."""
    script = cluster.folder / "waits.py"
    script.write_text(
        "import datetime, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=5))\n"
        "print('here', flush=True)\n"
        "while True: dist.all_reduce(torch.ones(1))\n"
    )
    words = ["launch", "--np", "2", "--cluster", cluster.name, "--run-dir", "frozen", "--max-restarts", "0", "--"]
    command = [sys.executable, "-m", "cpuft", *words, str(script)]
    environ = {**os.environ, "CPUFT_STATE": str(cluster.folder / "state")}
    with subprocess.Popen(
        command, cwd=cluster.folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        try:
            cluster.cpuft("provision", "local", "--name", cluster.name, "pause", "2")
            errors = process.communicate(timeout=150)[1]
        finally:
            process.kill()
            repair(cluster)
    assert process.returncode == 1, errors
    assert f"rank 0 on {cluster.hosts[0].name} failed" in errors, errors
    lost = f"host {cluster.hosts[1].name} does not answer, so rank 1 was lost"
    assert lost in errors.splitlines()[-1], errors
    # The thawed host finds out by itself that its mpirun is gone.
    look = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -q 'waits[.]py'"
    gone = f"for i in $(seq 20); do {look} || exit 0; sleep 1; done; echo there"
    assert [cluster.on(index, gone) for index in (1, 2)] == ["", ""]


def test_a_host_that_is_off_is_named_before_anything_starts(cluster: Simulated) -> None:
    assert cluster.cpuft("provision", "local", "--name", cluster.name, "kill", "2").returncode == 0
    done = cluster.cpuft("launch", "--np", "3", "--cluster", cluster.name, "--run-dir", "never")
    assert done.returncode == 2
    assert cluster.hosts[1].name in done.stderr.splitlines()[-1]
    assert not (cluster.folder / "never").exists()
    repair(cluster)


@pytest.mark.proof
def test_a_host_that_is_cut_off_while_it_is_asked_is_noticed_and_gets_nothing_later(cluster: Simulated) -> None:
    """Otherwise what was being sent would arrive when the host is back, after the run has been removed from it."""
    host, asked = cluster.hosts[1], time.monotonic()
    command = ("sh", "-c", "touch /var/tmp/asked && sleep 3 && cat > /var/tmp/late")

    def cut() -> None:
        while "asked" not in cluster.on(2, "ls /var/tmp"):
            time.sleep(0.1)
        cluster.cpuft("provision", "local", "--name", cluster.name, "cut", "2")

    thread = threading.Thread(target=cut)
    thread.start()
    with pytest.raises(CpuftError, match=re.escape(host.name)):
        SshTransport(cluster.ssh_config).run(host, command, "x" * 10_000_000, seconds=60)
    assert time.monotonic() - asked < 30
    thread.join()
    repair(cluster)
    time.sleep(20)
    assert cluster.on(2, "ls /var/tmp").split().count("asked") == 1
    assert cluster.on(2, "wc -c < /var/tmp/late || echo 0") != "10000000"
    cluster.on(2, "rm /var/tmp/asked /var/tmp/late")
