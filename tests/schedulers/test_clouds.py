"""Tasks of dstack and SkyPilot: their texts, what their nodes start, and clients that take them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cpuft.errors import CpuftError
from cpuft.schedulers.base import JOB_SECRET, NODE_COMMAND, JobLaunch, Scheduler
from cpuft.schedulers.dstack import Dstack, DstackOptions
from cpuft.schedulers.skypilot import SkyPilot, SkyPilotOptions
from tests.conftest import Golden
from tests.schedulers.programs import (
    AWKWARD_MORE,
    SAY,
    add_program,
    make_launch,
    path_with,
    run_script,
    told_of,
    words_said,
)
from tests.test_plans import AWKWARD

IMAGE = "registry.example/cpuft:0.1.0"
DSTACK = DstackOptions(name="mrpc-np8", image=IMAGE, cores=16, memory=64)
SKY = SkyPilotOptions(name="mrpc-np8", image=IMAGE, cores=16, memory=64)
FULL: tuple[tuple[Scheduler[Any], Any], ...] = (
    (Dstack(), replace(DSTACK, spot=True, seconds=3600, volume="runs-${{ dstack.node_rank }}")),
    (SkyPilot(), replace(SKY, spot=True, seconds=3600, infra="gcp/us-central1", bucket="s3://runs")),
)
SMALL: tuple[tuple[Scheduler[Any], Any], ...] = (
    (Dstack(), replace(DSTACK, retries=0)),
    (SkyPilot(), replace(SKY, retries=0)),
)
WORK = JobLaunch(("--np", "8", "--ppn", "2", "--task", "mrpc"), np=8, ppn=2)


@pytest.mark.parametrize("scheduler, options", FULL)
def test_the_text(scheduler: Scheduler[Any], options: Any, golden: Golden) -> None:
    golden(f"submit-{scheduler.name}.yaml", scheduler.render(options, WORK, "cpuft"))


SCHEMAS = """
import sys, yaml
task = yaml.safe_load(sys.stdin)
if sys.argv[1] == "dstack":
    from dstack._internal.core.models.configurations import parse_apply_configuration
    parse_apply_configuration(task)
else:
    import jsonschema
    from sky.utils import schemas
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())
    from sky.jobs.constants import DEFAULT_MANAGED_JOB_FIELDS
    assert {"job_id", "job_name", "status"} <= set(DEFAULT_MANAGED_JOB_FIELDS)  # what sky jobs queue shows
"""
PACKAGES = {"dstack": "dstack==0.22.5", "skypilot": "skypilot==0.14.1"}


@pytest.mark.proof
@pytest.mark.parametrize("which", [0, 1])
def test_their_own_packages_take_them(which: int, tmp_path: Path) -> None:
    """Each in an environment of its own, because it needs other versions than cpuft."""
    name = FULL[which][0].name
    subprocess.run([sys.executable, "-m", "venv", "own"], check=True, cwd=tmp_path)
    subprocess.run(["own/bin/python", "-m", "pip", "install", "--quiet", PACKAGES[name]], check=True, cwd=tmp_path)

    def find_fault(text: str) -> str:
        command = ("own/bin/python", "-c", SCHEMAS, name)
        return subprocess.run(command, cwd=tmp_path, input=text, text=True, capture_output=True, check=False).stderr

    for scheduler, options in (FULL[which], SMALL[which]):
        text = scheduler.render(options, WORK, "cpuft")
        assert find_fault(text) == ""
        assert find_fault(f"{text}nodez: 3\n")
        assert find_fault(scheduler.render(options, JobLaunch(("--np", "1")), "cpuft")) == ""


def script_of(scheduler: Scheduler[Any], options: Any, launch: JobLaunch) -> str:
    """What a node starts, with the service's own variables."""
    task = yaml.safe_load(scheduler.render(options, launch, "cpuft"))
    (text,) = task["commands"] if "commands" in task else (task["run"],)
    return str(text)


@pytest.mark.parametrize("value", [*AWKWARD, *AWKWARD_MORE])
@pytest.mark.parametrize("scheduler, options", SMALL)
def test_every_word_arrives_as_it_is(scheduler: Scheduler[Any], options: Any, value: str) -> None:
    """The node's program would run what comes after its folder."""
    add_program("cpuft", SAY)
    add_program("python", f'[ "$*" ] && shift {len(NODE_COMMAND) - 1} && exec "$@"\n')
    done = run_script("sh", script_of(scheduler, replace(options, name="xy"), make_launch(value)), **FIRST)
    assert (done.returncode, done.stderr) == (0, "")
    assert words_said() == told_of(value, "--grace-period", "20", end=("--run-dir", "runs/xy"))


FIRST = {"DSTACK_RUN_NAME": "a", "SKYPILOT_TASK_ID": "a"}
OTHER = {"DSTACK_RUN_NAME": "b", "SKYPILOT_TASK_ID": "b"}


@pytest.mark.parametrize("scheduler, options", SMALL)
def test_only_the_same_job_goes_on_with_its_run(scheduler: Scheduler[Any], options: Any) -> None:
    """The folder of another job's run is left to the launch, which refuses it."""
    add_program("cpuft", SAY)
    add_program("python", f'shift {len(NODE_COMMAND) - 1} && exec "$@"\n')
    script = script_of(scheduler, options, WORK)
    assert run_script("sh", script, **FIRST).returncode == 0
    assert words_said()[9:11] == ["--run-dir", "runs/mrpc-np8"]
    Path("runs/mrpc-np8").mkdir(parents=True)
    Path("runs/mrpc-np8/record.jsonl").write_text("{}")
    assert run_script("sh", script, **FIRST).returncode == 0
    assert words_said()[9:11] == ["--resume", "runs/mrpc-np8"]
    assert run_script("sh", script, **OTHER).returncode == 0
    assert words_said()[9:11] == ["--run-dir", "runs/mrpc-np8"]


def test_without_retries_an_interrupted_job_is_not_started_again() -> None:
    texts = [yaml.safe_load(scheduler.render(options, WORK, "cpuft")) for scheduler, options in SMALL + FULL]
    assert ["retry" in text for text in texts[::2]] == [False, True]
    codes = [text["resources"]["job_recovery"].get("recover_on_exit_codes") for text in texts[1::2]]
    assert codes == [None, [75]]


@pytest.mark.parametrize("scheduler, options", SMALL)
def test_what_cannot_be_a_job(scheduler: Scheduler[Any], options: Any) -> None:
    for changed, launch, said in (
        (replace(options, image=""), WORK, "no container image is given: add --image NAME"),
        (replace(options, nodes=9), WORK, "--nodes 9 contradicts --np 8 and --ppn 2: leave --nodes out"),
    ):
        with pytest.raises(CpuftError) as refusal:
            scheduler.render(changed, launch, "cpuft")
        assert str(refusal.value).startswith(said)


def test_what_dstack_would_replace_is_refused() -> None:
    with pytest.raises(CpuftError, match="which dstack replaces"):
        Dstack().render(DSTACK, make_launch("${{ secrets.a }}"), "cpuft")


KEEP_SECRET = f'printf %s "${JOB_SECRET}" >secret\n'


def test_dstacks_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret is in its environment, not among its words, and another one for each job."""
    monkeypatch.setenv("PATH", path_with())
    run: dict[str, Any] = {
        "status": "done",
        "run_spec": {"run_name": "mrpc-np8", "configuration": {"tags": {"managed-by": "cpuft"}}},
        "jobs": [{"job_submissions": [{"exit_status": None}]}],
    }
    theirs = {"status": "done", "run_spec": {"run_name": "theirs", "configuration": {}}, "jobs": []}

    def answer() -> None:
        Path("ps.json").write_text(json.dumps({"runs": [run, theirs]}))

    answer()
    here = Path.cwd()
    say = SAY + KEEP_SECRET
    add_program(
        "dstack", f"cd {here}\n{say}case $1 in ps) cat ps.json ;; logs) echo a line ;; apply) cat >text ;; esac\n"
    )
    text = Dstack().render(DSTACK, WORK, "cpuft")
    assert Dstack().submit(text) == "mrpc-np8"
    assert words_said() == ["apply", "--yes", "--detach", "--file", "-"]
    first = Path("secret").read_text()
    assert len(first) == 64
    assert Path("text").read_text() == text
    assert first not in text
    Dstack().submit(text)
    assert Path("secret").read_text() != first
    run["status"] = "provisioning"
    answer()
    with pytest.raises(CpuftError, match="dstack's run mrpc-np8 has not ended, and this one would replace it"):
        Dstack().submit(text)
    assert words_said() == ["ps", "--json"]  # with --all, it shows only the last hundred
    run["status"] = "running"
    answer()
    status = Dstack().status("mrpc-np8")
    assert (status.state, status.exit_code, status.log) == ("running", None, "a line\n")
    run["status"], run["jobs"][0]["job_submissions"][0]["exit_status"] = "failed", 75
    answer()
    assert Dstack().status("mrpc-np8").exit_code == 75
    assert Dstack().status("theirs").exit_code == 0
    assert [Dstack().is_ours(name) for name in ("mrpc-np8", "theirs")] == [True, False]
    assert words_said() == ["ps", "--all", "--json"]
    Dstack().cancel("mrpc-np8")
    assert words_said() == ["stop", "--yes", "mrpc-np8"]
    with pytest.raises(CpuftError, match="dstack has no run other"):
        Dstack().status("other")


def test_skypilots_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", path_with())
    jobs: list[dict[str, Any]] = [
        {"job_id": 12, "job_name": "cpuft-mrpc-np8", "status": "RUNNING"},
        {"job_id": 13, "job_name": "theirs", "status": "FAILED_SETUP"},
    ]
    Path("queue.json").write_text(json.dumps(jobs))
    say = SAY + KEEP_SECRET
    cases = 'queue) cat queue.json ;; logs) echo a line ;; launch) for last; do :; done; cat "$last" >text; '
    add_program("sky", f"cd {Path.cwd()}\n{say}case $2 in {cases}echo 'Managed Job ID: 12' ;; esac\n")
    text = SkyPilot().render(SKY, WORK, "cpuft")
    assert SkyPilot().submit(text) == "12"
    assert words_said()[:-1] == ["jobs", "launch", "--yes", "--detach-run", f"--secret={JOB_SECRET}"]
    assert (len(Path("secret").read_text()), Path("text").read_text()) == (64, text)
    status = SkyPilot().status("12")
    assert (status.state, status.exit_code, status.log) == ("RUNNING", None, "a line\n")
    assert SkyPilot().status("13").exit_code == 1
    assert [SkyPilot().is_ours(name) for name in ("12", "13")] == [True, False]
    SkyPilot().cancel("12")
    assert words_said() == ["jobs", "cancel", "--yes", "12"]
    program = Path("bin/sky")
    program.write_text(program.read_text().replace("echo a line", "exit 1"))  # a job that ended before it had a log
    assert (SkyPilot().status("13").exit_code, SkyPilot().status("13").log) == (1, "")
    with pytest.raises(CpuftError, match="SkyPilot has no managed job 14"):
        SkyPilot().status("14")


@pytest.mark.parametrize("answer", ["A new version is there\n[]", "[1]", '[{"job_id": 3}]', '{"runs": [{}]}', "null"])
@pytest.mark.parametrize(("scheduler", "client"), [(Dstack(), "dstack"), (SkyPilot(), "sky")])
def test_an_answer_of_another_version_is_named_in_one_line(
    scheduler: Scheduler[Any], client: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("answer").write_text(answer)
    add_program(client, "cat answer\n")
    monkeypatch.setenv("PATH", path_with())
    with pytest.raises(
        CpuftError, match=f"^(the answer of {client} has a form that cpuft does not know|SkyPilot has no)"
    ):
        scheduler.status("3")
