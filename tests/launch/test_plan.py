"""Plans of launches on hosts that do not exist."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cpuft.config import HostMemory, LaunchConfig, RunMemory, TrainConfig, split_run_memory
from cpuft.errors import CpuftError
from cpuft.hosts.cluster import Access, Assignment, Cluster
from cpuft.hosts.hostfile import Host
from cpuft.hosts.mpi_implementations import MpiImplementation
from cpuft.hosts.registry import NO_CLUSTER
from cpuft.hosts.transport import SshTransport
from cpuft.launch.plan import (
    LEAST_FREE_BYTES,
    add_call,
    choose_run_dir,
    name_script,
    plan_launch,
    plan_script,
    plan_settings,
    plan_training,
    refuse_other_launchers,
    wrap_script,
)
from cpuft.launch.resume import ResumedRun
from cpuft.launch.supervise import run_on_this_machine
from cpuft.plan import RunPlan, Step, format_plan
from tests.conftest import Golden, make_facts
from tests.records import make_state


def make_cluster(ranks: tuple[int, ...], mpi: str = "intel") -> Cluster:
    """Hosts node1, node2, ... with so many ranks each."""
    numbers = range(1, len(ranks) + 1)
    return Cluster(
        tuple(Assignment(Host(f"node{number}"), count) for number, count in zip(numbers, ranks)),
        tuple(make_facts(number, target="10.0.0.1" if number > 1 else "10.0.0.2") for number in numbers),
        MpiImplementation("mpirun", mpi),
        access=Access(entry=dataclasses.replace(NO_CLUSTER, python="python")),
    )


@pytest.mark.parametrize("mpi", ["intel", "mpich", "openmpi", "srun"])
def test_plan_of_a_script_on_four_hosts(mpi: str, golden: Golden) -> None:
    plan = plan_launch(
        make_cluster((1, 1, 1, 1), mpi),
        LaunchConfig(np=4),
        "/runs/one",
        ("python", "train.py"),
        "ccl",
        {"FI_PROVIDER": "efa"},
    )
    golden(f"launch-{mpi}.sh", format_plan(plan.full_plan))


def test_plan_of_a_training_on_one_host(golden: Golden) -> None:
    plan = plan_training(make_cluster((2,)), LaunchConfig(np=2), TrainConfig(task="mrpc"), "/runs/one", "lines", {})
    golden("launch-training.sh", format_plan(plan.full_plan))


def test_hosts_on_one_machine_have_different_cores_and_are_recorded_as_simulated() -> None:
    def plan(cluster: Cluster) -> tuple[list[str], bool]:
        config = LaunchConfig(np=len(cluster.facts))
        (start,) = plan_training(cluster, config, TrainConfig(), "/runs/one", "lines", {}).ranks[0]
        cores = [one["CPUFT_CORES"] for one in settings_of(cluster, config, "gloo")]
        return cores, "--simulated=True" in start.command

    two = make_cluster((1, 1))
    apart = dataclasses.replace(two, facts=tuple(dataclasses.replace(one, cpu_quota=2.0) for one in two.facts))
    assert plan(apart) == (["0,1", "0,1"], False)
    assert plan(
        dataclasses.replace(apart, facts=tuple(dataclasses.replace(one, boot_id="x") for one in apart.facts))
    ) == (["0,1", "2,3"], True)
    one, simulated = make_cluster((1,)), Access(entry=dataclasses.replace(NO_CLUSTER, kind="local"))
    assert (plan(one)[1], plan(dataclasses.replace(one, access=simulated))[1]) == (False, True)


def test_a_function_is_sent_to_every_host_with_a_disk_of_its_own(tmp_path: Path) -> None:
    cluster = make_cluster((1, 1))
    here = add_call(RunPlan(), "/tmp/call", cluster, str(tmp_path / "run"))
    assert here.inputs == ()
    ((step,),) = here.prepare
    shared = dataclasses.replace(cluster, works_remotely=True)
    subprocess.run(step.command, input=b"the call", check=True)
    assert (tmp_path / "run/function/call").read_bytes() == b"the call"
    assert (tmp_path / "run/function/call").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "run/function").stat().st_mode & 0o777 == 0o700
    there = add_call(RunPlan(), "/tmp/call", shared, "/var/tmp/cpuft-0/a/run")
    assert there.prepare == ()
    assert [(one.host, one.stdin_file) for stage in there.inputs for one in stage] == [
        ("node1", "/tmp/call"),
        ("node2", "/tmp/call"),
    ]


@pytest.mark.parametrize(("asked", "notice"), [("", "http://there/it"), ("/mine", "/mine")])
def test_the_users_interruption_notice_replaces_that_of_the_cluster(asked: str, notice: str) -> None:
    entry = dataclasses.replace(NO_CLUSTER, notice="http://there/it")
    cluster = dataclasses.replace(make_cluster((1, 1)), access=Access(entry=entry))
    plan = plan_launch(cluster, LaunchConfig(np=2, interruption_notice=asked), "/runs/one", ("true",), "gloo", {})
    ((ranks,),) = plan.ranks
    assert [words for words in zip(ranks.command, ranks.command[1:]) if "CPUFT_NOTICE" in words[0]] == [
        ("CPUFT_NOTICE", notice)
    ]


def test_a_run_folder_that_another_launch_has_just_made_is_named(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "runs" / "one")
    plan = plan_launch(make_cluster((1,)), LaunchConfig(np=1), run_dir, ("true",), "gloo", {})
    ((make,),) = plan.make
    plan = RunPlan(((dataclasses.replace(make, host=""),),), ranks=((Step("train", ("true",)),),))
    assert run_on_this_machine(plan, run_dir, make_state(), os.environ, 0.0, SshTransport()) == 0
    with pytest.raises(CpuftError, match=f"another run took {run_dir}.: give a new folder with --run-dir"):
        run_on_this_machine(plan, run_dir, make_state(), os.environ, 0.0, SshTransport())
    assert sorted(path.name for path in Path(run_dir).iterdir()) == ["logs", "plan.sh", "state.json"]


SECRETS = dict.fromkeys(("HF_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "CCL_KEY", "FI_PASSWORD"), "hunter2")


@pytest.mark.parametrize("mpi", ["intel", "mpich", "openmpi"])
@pytest.mark.parametrize("ranks", [(2,), (1, 1)], ids=["one host", "two hosts"])
@pytest.mark.parametrize("away", [False, True], ids=["here", "away"])
def test_plans_show_no_secret_values(mpi: str, ranks: tuple[int, ...], away: bool) -> None:
    cluster = dataclasses.replace(make_cluster(ranks, mpi), works_remotely=away)
    plan = plan_training(cluster, LaunchConfig(np=2), TrainConfig(), "/runs/one", "lines", SECRETS)
    assert "hunter2" not in repr(plan)
    assert all(any(name in note for note in plan.notes) for name in SECRETS)


def test_which_secrets_are_sent_to_hosts() -> None:
    one = plan_launch(make_cluster((2,)), LaunchConfig(np=2), "/runs/one", ("true",), "gloo", SECRETS)
    inherited = "may be secret, so ranks only inherit them: CCL_KEY, FI_PASSWORD, HF_API_KEY, HF_TOKEN, OPENAI_API_KEY"
    assert inherited in one.notes
    assert one.ranks[0][0].command[0] == "sh"
    two = plan_launch(make_cluster((1, 1)), LaunchConfig(np=2), "/runs/one", ("true",), "gloo", SECRETS)
    assert "may be secret, so each rank gets them in a file of its own, over ssh: CPUFT_RUN_KEY, HF_TOKEN" in two.notes
    local = "CCL_KEY, FI_PASSWORD, HF_API_KEY, OPENAI_API_KEY"
    assert f"may be secret, so they stay on this machine, and ranks do not get them: {local}" in two.notes
    command = two.ranks[0][0].command
    assert command[:11] == ("env", *(word for name in sorted(SECRETS) for word in ("-u", name)))
    files = [command[at + 1] for at, word in enumerate(command) if word == "CPUFT_SENT"]
    assert [re.sub("[0-9a-f]{12}", "MARK", path) for path in files] == [
        "/var/tmp/cpuft-0/MARK.sent/0",
        "/var/tmp/cpuft-0/MARK.sent/1",
    ]


def settings_of(cluster: Cluster, config: LaunchConfig, backend: str, **environ: str) -> list[dict[str, str]]:
    """Each host's settings by name, the shared ones included."""
    shared, per_host = plan_settings(cluster, config, backend, environ)
    return [{setting.name: setting.value for setting in shared + own} for own in per_host]


def test_the_recipes_settings_on_its_machine() -> None:
    """Of 32 cores, four are for communication and 28 for OpenMP, as in the published recipe."""
    (first, _) = settings_of(make_cluster((1, 1)), LaunchConfig(np=2), "ccl")
    assert first["OMP_NUM_THREADS"] == "28"
    assert first["I_MPI_PIN_DOMAIN"] == "[0xfffffff0]"
    assert first["CCL_WORKER_COUNT"] == "4"
    assert first["CCL_WORKER_AFFINITY"] == "0,1,2,3"
    assert first["MASTER_ADDR"] == "10.0.0.1"
    assert first["GLOO_SOCKET_IFNAME"] == "ens5"


def test_each_host_has_settings_from_its_own_cores() -> None:
    cluster = make_cluster((1, 1))
    small = make_facts(2, sockets=1, cores=8, target="10.0.0.1")
    cluster = dataclasses.replace(cluster, facts=(cluster.facts[0], small))
    threads = [host["OMP_NUM_THREADS"] for host in settings_of(cluster, LaunchConfig(np=2), "gloo")]
    assert threads == ["32", "8"]


def test_either_mpirun_or_cpuft_pins_the_ranks() -> None:
    (host,) = settings_of(make_cluster((2,)), LaunchConfig(np=2), "gloo")
    assert ("I_MPI_PIN_DOMAIN" in host, "CPUFT_PIN" in host) == (True, False)
    (host,) = settings_of(make_cluster((2,), "openmpi"), LaunchConfig(np=2), "gloo")
    assert ("I_MPI_PIN_DOMAIN" in host, host["CPUFT_PIN"]) == (False, "rank")
    (host,) = settings_of(make_cluster((2,)), LaunchConfig(np=2), "gloo", I_MPI_PIN_DOMAIN="socket")
    assert (host["I_MPI_PIN_DOMAIN"], "CPUFT_CORES" in host) == ("socket", False)


@pytest.mark.parametrize(
    "hosts, boots, expected",
    ((1, 1, ("shm", "1")), (2, 2, ("shm:ofi", "1")), (2, 1, ("ofi", "0"))),
    ids=("one host", "two hosts", "two hosts that are one machine"),
)
def test_when_ranks_use_shared_memory(hosts: int, boots: int, expected: tuple[str, str]) -> None:
    cluster = make_cluster((2 // hosts,) * hosts)
    facts = tuple(dataclasses.replace(one, boot_id=str(at % boots)) for at, one in enumerate(cluster.facts))
    shared = settings_of(dataclasses.replace(cluster, facts=facts), LaunchConfig(np=2), "gloo")[0]
    assert (shared["I_MPI_FABRICS"], shared["CCL_ATL_SHM"]) == expected


def test_too_many_comm_cores() -> None:
    with pytest.raises(CpuftError, match="16 ranks on 32 cores have 2 cores each, and communication takes 2"):
        plan_settings(make_cluster((16,)), LaunchConfig(np=16, comm_cores=2), "ccl", {})


def test_scripts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    assert plan_script(("train.py", "--lr", "1")) == (sys.executable, str(tmp_path / "train.py"), "--lr", "1")
    command, python = plan_script(("train.py", "--lr", "1")), sys.executable
    for start in (("python",), ("python3", "-u"), (sys.executable,)):
        assert plan_script((*start, "train.py", "--lr", "1")) == command
    assert plan_script(("python", "-m", "a.train", "-x")) == (sys.executable, "-m", "a.train", "-x")
    assert wrap_script((python, "-m", "a.train"), python, wrap=False) == ("-m", "cpuft.rank.script", "-m", "a.train")
    names = [("train.py",), ("python", "-m", "a.train"), ("bash", "-c", "true")]
    assert [name_script(plan_script(words)) for words in names] == ["train", "train", "bash"]
    assert name_script((sys.executable,)) == Path(sys.executable).stem
    words = (str(tmp_path / "train.py"), "--lr", "1")
    assert wrap_script(command, python, wrap=True) == ("-m", "cpuft.train.wrap", *words)
    assert wrap_script(command, python, wrap=False) == ("-m", "cpuft.rank.script", *words)
    assert wrap_script(("bash", "some.py"), python, wrap=False) == ("bash", "some.py")
    with pytest.raises(CpuftError, match="--wrap takes a Python script"):
        wrap_script(("bash", "-c", "true"), python, wrap=True)
    assert plan_script(("bash", "-c", "true")) == ("bash", "-c", "true")
    with pytest.raises(CpuftError, match=r"there is no script other\.py"):
        plan_script(("other.py",))
    with pytest.raises(CpuftError, match="there is no script or program no-such-program"):
        plan_script(("no-such-program",))


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (("torchrun", "train.py"), "torchrun"),
        (("/usr/bin/accelerate", "launch", "train.py"), "accelerate"),
        (("python", "-m", "torch.distributed.run", "train.py"), "torchrun"),
        (("python", "-u", "-X", "dev", "-m", "torch.distributed.run", "train.py"), "torchrun"),
    ],
)
def test_another_launcher_is_refused(script: tuple[str, ...], name: str) -> None:
    with pytest.raises(CpuftError, match=f"starts the ranks itself, and {name} would start .* leave {name} and its"):
        refuse_other_launchers(script)
    refuse_other_launchers(("python", "-m", "train"))
    refuse_other_launchers(("python", "-u", "train.py", "-m", "torch.distributed.run"))
    refuse_other_launchers(("train.py", "torchrun"))


def test_run_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(rf"{tmp_path}/runs/mrpc-np2-\d{{8}}-\d{{6}}", choose_run_dir("", "mrpc-np2"))
    (tmp_path / "link").symlink_to(".")
    for name in ("mine", "link/new/../mine"):
        assert choose_run_dir(name, "x") == str(tmp_path / "mine")
    (tmp_path / "mine").mkdir()
    with pytest.raises(CpuftError, match="exists already, and a run needs a new folder: give --run-dir the name"):
        choose_run_dir("mine", "x")
    with pytest.raises(CpuftError, match=r"is not writable: give another folder"):
        choose_run_dir("/etc/hostname/runs", "x")
    monkeypatch.setattr("cpuft.launch.plan.LEAST_FREE_BYTES", 1 << 62)
    with pytest.raises(CpuftError, match="is full"):
        choose_run_dir("other", "x")
    assert LEAST_FREE_BYTES < 1 << 30


def test_launches_of_one_second_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "20260102-030405")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = "import time; time.strftime = lambda form: '20260102-030405'\n"
    text += "from cpuft.launch.plan import choose_run_dir; print(choose_run_dir('', 'mrpc-np2'), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", text], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == f"{tmp_path}/runs/mrpc-np2-20260102-030405\n"
        second = choose_run_dir("", "mrpc-np2")
        assert second == f"{tmp_path}/runs/mrpc-np2-20260102-030405-2"
        Path(second).mkdir(parents=True)
        assert choose_run_dir("", "mrpc-np2") == f"{tmp_path}/runs/mrpc-np2-20260102-030405-3"
        assert choose_run_dir("", "sst2-np2") == f"{tmp_path}/runs/sst2-np2-20260102-030405"
        other.communicate("\n")
    assert choose_run_dir("", "mrpc-np2") == f"{tmp_path}/runs/mrpc-np2-20260102-030405"


def find_rooms(cluster: Cluster, apart: bool = False, resumed: ResumedRun | None = None) -> RunMemory | None:
    """What the plan of a training tells its preparation of these hosts."""
    plan = plan_training(cluster, LaunchConfig(np=2), TrainConfig(), "/runs/one", "lines", {}, apart, resumed)
    ((prepare,),) = plan.prepare
    return split_run_memory(prepare.command)[0]


def test_the_preparation_gets_the_memory_of_the_hosts() -> None:
    cluster = make_cluster((1, 1))
    assert find_rooms(cluster) is None  # hosts that do not know refuse nothing
    free = [dataclasses.replace(facts, memory_free=8 << 30) for facts in cluster.facts]
    free[1] = dataclasses.replace(free[1], memory_left=2 << 30, boot_id="boot-1")
    cluster = dataclasses.replace(cluster, facts=tuple(free))
    first = HostMemory("node1", 1, 8 << 30, "boot-1", 8 << 30)
    told = RunMemory((first, HostMemory("node2", 1, 2 << 30, "boot-1", 8 << 30)), "fp32")
    assert find_rooms(cluster) == told
    assert find_rooms(cluster, apart=True) == dataclasses.replace(told, independent=True)
    assert find_rooms(cluster, resumed=ResumedRun("/runs/one")) == told
    # What is left of the ranks that were lost may still be on its way out.
    assert find_rooms(cluster, resumed=ResumedRun("/runs/one", restart_reason="rank 1 was lost")) is None
