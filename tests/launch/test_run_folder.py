"""Which folder a new run gets, and how it is made."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cpuft.config.launch import LaunchConfig
from cpuft.errors import CpuftError
from cpuft.execute import run_stages
from cpuft.hosts.transport import SshTransport
from cpuft.launch.plan import plan_ranks
from cpuft.launch.run_folder import LEAST_FREE_BYTES, choose_run_dir, plan_claim
from cpuft.launch.run_state import read_state
from cpuft.launch.supervise import run_as_head_host
from cpuft.plans import Plan, RunPlan, Step
from tests.launch.test_plan import make_cluster
from tests.records import make_state


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
    monkeypatch.setattr("cpuft.launch.run_folder.LEAST_FREE_BYTES", 1 << 62)
    with pytest.raises(CpuftError, match="is full"):
        choose_run_dir("other", "x")
    assert LEAST_FREE_BYTES < 1 << 30


def test_launches_of_one_second_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "20260102-030405")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = "import time; time.strftime = lambda form: '20260102-030405'\n"
    text += "from cpuft.launch.run_folder import choose_run_dir\n"
    text += "print(choose_run_dir('', 'mrpc-np2'), flush=True); input()"
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


def test_the_state_of_a_run_with_thousands_of_ranks_fits_into_the_step_that_writes_it(tmp_path: Path) -> None:
    state = make_state(*(f"ip-10-0-{number}.eu-central-1.compute.internal" for number in range(4096)))
    run_stages(Plan(((plan_claim(str(tmp_path / "run"), state, False),),)), 60.0, print, "look")
    assert read_state(str(tmp_path / "run")) == state


def test_a_run_folder_that_another_launch_has_just_made_is_named(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "runs" / "one")
    plan = plan_ranks(make_cluster((1,)), LaunchConfig(np=1), run_dir, ("true",), "gloo", {})
    ((make,),) = plan.make
    plan = RunPlan(((dataclasses.replace(make, host=""),),), ranks=((Step("train", ("true",)),),))
    assert run_as_head_host(plan, run_dir, make_state(), 0.0, SshTransport()) == 0
    with pytest.raises(CpuftError, match=f"another run took {run_dir}.: give a new folder with --run-dir"):
        run_as_head_host(plan, run_dir, make_state(), 0.0, SshTransport())
    assert sorted(path.name for path in Path(run_dir).iterdir()) == ["logs", "plan.sh", "state.json"]
