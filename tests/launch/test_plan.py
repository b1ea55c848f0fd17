"""Plans of launches on hosts that do not exist."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cpuft.config.launch import LaunchConfig, ScriptConfig
from cpuft.config.train import TrainConfig
from cpuft.host_memory import HostMemory, RunMemory, split_run_memory
from cpuft.hosts.cluster import Access, Cluster
from cpuft.hosts.hostfile import Host
from cpuft.hosts.mpi_implementations import MpiImplementation
from cpuft.hosts.rank_counts import Assignment
from cpuft.hosts.registry import NO_CLUSTER
from cpuft.launch.plan import Job, add_call, plan_ranks, plan_run, plan_training
from cpuft.launch.rank_variables import plan_settings
from cpuft.launch.resume import ResumedRun
from cpuft.plans import RunPlan, format_plan
from tests.conftest import Golden, make_facts


def make_cluster(ranks: tuple[int, ...], mpi: str = "intel") -> Cluster:
    """Hosts node1, node2, ... with so many ranks each."""
    numbers = range(1, len(ranks) + 1)
    return Cluster(
        tuple(Assignment(Host(f"node{number}"), count) for number, count in zip(numbers, ranks)),
        tuple(make_facts(number, target="10.0.0.1" if number > 1 else "10.0.0.2") for number in numbers),
        MpiImplementation("mpirun", mpi),
        access=Access(entry=dataclasses.replace(NO_CLUSTER, python="python")),
    )


def settings_of(cluster: Cluster, config: LaunchConfig, backend: str, **environ: str) -> list[dict[str, str]]:
    """Each host's settings by name, the shared ones included."""
    shared, per_host = plan_settings(cluster, config, backend, environ)
    return [{setting.name: setting.value for setting in shared + own} for own in per_host]


@pytest.mark.parametrize("mpi", ["intel", "mpich", "openmpi", "srun"])
def test_plan_of_a_script_on_four_hosts(mpi: str, golden: Golden) -> None:
    plan = plan_ranks(
        make_cluster((1, 1, 1, 1), mpi),
        LaunchConfig(np=4),
        "/runs/one",
        ("python", "train.py"),
        "ccl",
        {"FI_PROVIDER": "efa"},
    )
    golden(f"launch-{mpi}.sh", format_plan(plan.full_plan))


def test_the_command_that_resumes_a_script_has_the_script_and_its_options() -> None:
    script = (sys.executable, "/home/me/train.py", "a b")
    job = Job("/runs/one", LaunchConfig(np=1), TrainConfig(), script, ScriptConfig(independent=True))
    command = plan_run(job, make_cluster((1,))).format_resume(job.run_dir)
    assert command == "cpuft launch --resume /runs/one --independent -- python /home/me/train.py 'a b'"


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
    plan = plan_ranks(cluster, LaunchConfig(np=2, interruption_notice=asked), "/runs/one", ("true",), "gloo", {})
    ((ranks,),) = plan.ranks
    assert [words for words in zip(ranks.command, ranks.command[1:]) if "CPUFT_NOTICE" in words[0]] == [
        ("CPUFT_NOTICE", notice)
    ]


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
    one = plan_ranks(make_cluster((2,)), LaunchConfig(np=2), "/runs/one", ("true",), "gloo", SECRETS)
    inherited = "may be secret, so ranks only inherit them: CCL_KEY, FI_PASSWORD, HF_API_KEY, HF_TOKEN, OPENAI_API_KEY"
    assert inherited in one.notes
    assert one.ranks[0][0].command[0] == "sh"
    two = plan_ranks(make_cluster((1, 1)), LaunchConfig(np=2), "/runs/one", ("true",), "gloo", SECRETS)
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
