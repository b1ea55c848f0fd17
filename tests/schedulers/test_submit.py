"""`cpuft submit`: what is submitted, and how answers are shown. Stand-ins replace the schedulers' programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpuft.cli import main
from cpuft.errors import CpuftError
from cpuft.schedulers import parse_job
from cpuft.schedulers.base import follow_job
from tests.schedulers.programs import SAY, add_program, words_said

LAUNCH = ("--", "launch", "--np", "2", "--task", "mrpc")
IMAGE = ("--image", "i")


@pytest.fixture(autouse=True)
def _only_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """No program of this machine but the shell's own, and cat."""
    add_program("cat", 'exec /bin/cat "$@"\n')
    monkeypatch.setenv("PATH", str(Path("bin").absolute()))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, and both streams."""
    with pytest.raises(SystemExit) as ended:
        main(["submit", *words])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


@pytest.mark.parametrize(
    "words, program, answer, job",
    [
        (("slurm", "--name", "x"), "sbatch", "12", "slurm:12"),
        (("slurm", "--name", "x"), "sbatch", "12;gpu", "slurm:12"),
        (("kubernetes", "--name", "x", *IMAGE), "kubectl", "mpijob.kubeflow.org/x", "kubernetes:x"),
        (
            ("kubernetes", "--name", "x", "--namespace", "n", *IMAGE),
            "kubectl",
            "mpijob.kubeflow.org/x",
            "kubernetes:n/x",
        ),
    ],
)
def test_the_text_of_a_dry_run_is_submitted(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], program: str, answer: str, job: str
) -> None:
    code, shown, _ = run(capsys, *words, "--dry-run", *LAUNCH)
    assert code == 0
    add_program(program, f"cat >given\necho '{answer}'\n")
    assert run(capsys, *words, *LAUNCH) == (0, f"{job}\n", "")
    assert Path("given").read_text() == shown
    assert parse_job(job)[1] == job.rpartition(":")[2].rpartition("/")[2]


def test_a_job_without_a_name_gets_one(capsys: pytest.CaptureFixture[str]) -> None:
    _, shown, _ = run(capsys, "slurm", "--dry-run", "--", "launch", "--np", "4", "--", "a b.py")
    assert "\n#SBATCH --job-name=script-np4-" in shown


@pytest.mark.parametrize(
    "words, said",
    [
        (("slurm",), "no launch is given: write it at the end, e.g. -- launch --np 8 --task mrpc"),
        (("slurm", "--", "compare"), "no launch is given: write it at the end, e.g. -- launch --np 8 --task mrpc"),
        (("slurm", "--", "launch", "--tsk", "a"), "No such option '--tsk'. Did you mean '--task'? (see cpuft launch"),
        (("slurm", "--", "launch", "--np", "0"), "--np '0' is not valid: give a whole number of 1 or more (see cpuft"),
        (
            ("slurm", "--", "launch", "--task", "mprc"),
            "'mprc' is not a value of --task: did you mean mrpc? (see cpuft launch",
        ),
        (("slurm", "--", "launch", "--num_processes", "4"), "write --np instead of --num_processes (see cpuft launch"),
        (
            ("slurm", "--", "launch", "--dry-run"),
            "--dry-run is an option of cpuft submit: write it before -- launch",
        ),
        (
            ("slurm", "--", "launch", "train.py"),
            "a script comes after a -- of its own, e.g. -- launch --np 8 -- train.py",
        ),
        (("slurm", "--", "launch", "--iface", "\udc80"), "the launch contains bytes that are not UTF-8, which no"),
        (("slurm", "--array", "0-3", "--wait", *LAUNCH), "--wait follows one job: leave it out with --array"),
        (
            ("slurm", "--partitoin", "a", *LAUNCH),
            "No such option '--partitoin'. Did you mean '--partition'? (see",
        ),
        (("slurm", "--nodes", "3", *LAUNCH), "--nodes 3 does not agree with --np 2 and --ppn 0: leave --nodes out"),
        (("slurm", "--partition", "a b", *LAUNCH), "'--partition=a b' cannot stand in a job script: write"),
        (("slurm", "--config", "none.yaml", *LAUNCH), "--config none.yaml: there is no such file"),
        (("kubernetes", *LAUNCH), "no container image is given: add --image NAME, an image that has cpuft and sshd"),
        (
            ("kubernetes", *IMAGE, "--name", "a_b", *LAUNCH),
            "--name 'a_b': use at most 54 small letters, digits",
        ),
        (("batch", *IMAGE, *LAUNCH), "no job queue is given: add --queue NAME"),
        (("status", "12"), "'12' is not a job: write what cpuft submit printed, e.g. slurm:1234"),
        (("cancel", "slurm:-1"), "'slurm:-1' is not a job: write what cpuft submit printed, e.g. slurm:1234"),
    ],
)
def test_bad_input_gets_one_line_and_submits_nothing(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    for program in ("sbatch", "kubectl", "scontrol", "scancel"):
        add_program(program, SAY)
    code, output, errors = run(capsys, *words)
    assert (code, output) == (2, "")
    assert errors.startswith(f"cpuft: error: {said}")
    assert errors.count("\n") == 1
    assert not Path("said").exists()


@pytest.mark.parametrize(
    "words, program",
    [
        (("slurm", *LAUNCH), "sbatch"),
        (("kubernetes", *IMAGE, *LAUNCH), "kubectl"),
        (("status", "slurm:1"), "scontrol"),
        (("cancel", "kubernetes:a/b"), "kubectl"),
    ],
)
def test_a_missing_client_is_an_error(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], program: str) -> None:
    said = f"cpuft: error: {program} failed (no such program: {program}): correct that and run the command again\n"
    assert run(capsys, *words) == (2, "", said)


@pytest.mark.parametrize(
    "words, program, says",
    [
        (("slurm", *LAUNCH), "sbatch", "sbatch: error: invalid partition specified: cpu"),
        (("kubernetes", *IMAGE, *LAUNCH), "kubectl", 'Error from server (AlreadyExists): mpijobs "x" already exists'),
        (("status", "slurm:9"), "scontrol", "slurm_load_jobs error: Invalid job id specified"),
        (("cancel", "slurm:9"), "scontrol", "slurm_load_jobs error: Invalid job id specified"),
        (("cancel", "kubernetes:n/x"), "kubectl", 'Error from server (NotFound): mpijobs.kubeflow.org "x" not found'),
    ],
)
def test_a_refusal_is_shown_in_the_schedulers_own_words(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], program: str, says: str
) -> None:
    add_program("scancel", SAY)
    add_program(program, f"cat >given\necho '{says}' >&2\nexit 1\n")
    said = f"cpuft: error: {program} failed ({says}): correct that and run the command again\n"
    assert run(capsys, *words) == (2, "", said)
    assert not Path("said").exists()


def add_slurm(state: str, ended: str = "0:0", comment: str = "cpuft", reason: str = "None") -> None:
    """A Slurm that has one job, which says something."""
    lines = (
        "JobId=12 JobName=x",
        f"   JobState={state} Reason={reason} Dependency=(null)",
        f"   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={ended}",
        f"   StdOut={Path('x 12.out').absolute()}",
        f"   Comment={comment} ",
        "   Power=",
    )
    Path("answer").write_text("\n".join(lines))
    add_program("scontrol", f"{SAY}cat answer\n")


@pytest.mark.parametrize(
    "state, ended, told",
    [
        ("PENDING", "0:0", "PENDING"),
        ("RUNNING", "0:0", "RUNNING"),
        ("COMPLETING", "0:0", "COMPLETING"),
        ("REQUEUED", "75:0", "REQUEUED"),
        ("COMPLETED", "0:0", "COMPLETED, exit code 0"),
        ("FAILED", "7:0", "FAILED, exit code 7"),
        ("FAILED", "0:9", "FAILED, exit code 137"),
        ("TIMEOUT", "0:15", "TIMEOUT, exit code 143"),
        ("NODE_FAIL", "0:0", "NODE_FAIL, exit code 1"),
        ("COMPLETED ExitCode=0:0 JobState=FAILED", "3:0", "COMPLETED, FAILED, exit code 3"),
        ("COMPLETED ExitCode=0:0 JobState=RUNNING", "0:0", "COMPLETED, RUNNING"),
    ],
)
def test_the_state_of_a_slurm_job_is_shown(
    capsys: pytest.CaptureFixture[str], state: str, ended: str, told: str
) -> None:
    add_slurm(state, ended)
    assert run(capsys, "status", "slurm:12") == (0, f"slurm:12 {told}\n", "")
    assert words_said() == ["show", "job", "12"]
    Path("x 12.out").write_text("step 1\nstep 2\n")
    assert run(capsys, "status", "slurm:12") == (0, f"slurm:12 {told}: step 2\n", "")


def test_a_slurm_job_is_cancelled(capsys: pytest.CaptureFixture[str]) -> None:
    add_slurm("RUNNING")
    add_program("scancel", SAY)
    assert run(capsys, "cancel", "slurm:12_3") == (0, "", "")
    assert words_said() == ["12_3"]


FOREIGN = "cpuft: error: {} was not submitted by cpuft submit: check the name, or end the job with the scheduler's own"
FOREIGN += " client\n"


@pytest.mark.parametrize("mark", ["", "not-cpuft", "cpuft-not"])
def test_a_job_of_somebody_else_is_left_alone(capsys: pytest.CaptureFixture[str], mark: str) -> None:
    add_slurm("RUNNING", comment=mark)
    add_program("scancel", SAY)
    assert run(capsys, "cancel", "slurm:12") == (2, "", FOREIGN.format("slurm:12"))
    assert words_said() == ["show", "job", "12"]
    Path("said").unlink()
    add_program("kubectl", KUBECTL.replace("LOGS", "exit 1").replace("OWNER", mark))
    assert run(capsys, "cancel", "kubernetes:x") == (2, "", FOREIGN.format("kubernetes:x"))
    assert "delete" not in Path("said").read_text()


def test_wait_shows_the_log_and_exits_with_the_jobs_code(capsys: pytest.CaptureFixture[str]) -> None:
    add_program("sbatch", "echo 12\n")
    add_slurm("FAILED", "7:0")
    Path("x 12.out").write_text("step 1\nstep 2\n")
    assert run(capsys, "slurm", "--wait", *LAUNCH) == (7, "slurm:12\nstep 1\nstep 2\n", "")


def test_wait_ends_for_a_job_that_can_never_start(capsys: pytest.CaptureFixture[str]) -> None:
    """Nine nodes of a partition that has two: by default sbatch takes such a job."""
    add_program("sbatch", "echo 12\n")
    add_slurm("PENDING", reason="PartitionNodeLimit")
    code, output, errors = run(capsys, "slurm", "--wait", *LAUNCH)
    assert (code, output) == (2, "slurm:12\n")
    assert errors.startswith("cpuft: error: job slurm:12 can never start (PartitionNodeLimit): ")
    assert run(capsys, "status", "slurm:12") == (0, "slurm:12 PENDING (PartitionNodeLimit)\n", "")
    add_slurm("PENDING", reason="Resources")
    assert run(capsys, "status", "slurm:12") == (0, "slurm:12 PENDING\n", "")


def test_a_log_is_followed_over_restarts_and_failures_of_the_scheduler() -> None:
    log = Path("x 12.out")
    turns: Iterator[Callable[[], object]] = iter(
        [
            lambda: add_slurm("RUNNING"),
            lambda: log.write_text("step 1\n"),
            lambda: add_program("scontrol", "exit 1\n"),
            lambda: add_slurm("PENDING", "75:0"),
            lambda: log.write_text("step 1\nstep 2\n"),
            lambda: log.write_text("anew\n"),
            lambda: add_slurm("COMPLETED"),
        ]
    )
    add_slurm("PENDING")
    said: list[str] = []
    assert follow_job(*parse_job("slurm:12"), said.append, lambda seconds: (next(turns)(), None)[1]) == 0
    assert "".join(said) == "step 1\nstep 2\nanew\n"


def test_following_ends_when_the_scheduler_does_not_answer_for_long() -> None:
    pauses: list[float] = []
    with pytest.raises(CpuftError, match=r"^scontrol failed \(no such program: scontrol\)"):
        follow_job(*parse_job("slurm:12"), print, pauses.append)
    assert len(pauses) == 19


KUBECTL = """printf '%s ' "$@" >>said
case "$*" in
    *conditions*) echo "CONDITIONS" ;;
    *managed-by*) echo "OWNER" ;;
    *exitCode*) echo "CODES" ;;
    logs*) LOGS ;;
esac
"""


@pytest.mark.parametrize(
    "conditions, codes, logs, told",
    [
        ("", "", "exit 1", "Pending"),
        ("Created", "", "exit 1", "Created"),
        ("Created Running", "", "echo a; echo b", "Running: b"),
        ("Created Restarting", "75", "echo a", "Restarting: a"),
        ("Created Succeeded", "0", "echo a", "Succeeded, exit code 0: a"),
        ("Created Failed", "7", "echo a", "Failed, exit code 7: a"),
        ("Created Failed", "", "exit 1", "Failed, exit code 1"),
    ],
)
def test_the_state_of_a_kubernetes_job_is_shown(
    capsys: pytest.CaptureFixture[str], conditions: str, codes: str, logs: str, told: str
) -> None:
    script = KUBECTL.replace("CONDITIONS", conditions).replace("CODES", codes).replace("LOGS", logs)
    add_program("kubectl", script)
    assert run(capsys, "status", "kubernetes:n/x") == (0, f"kubernetes:n/x {told}\n", "")
    assert Path("said").read_text().count("--namespace=n ") == 3


def test_a_kubernetes_job_is_cancelled(capsys: pytest.CaptureFixture[str]) -> None:
    add_program("kubectl", KUBECTL.replace("LOGS", "exit 1").replace("OWNER", "cpuft"))
    assert run(capsys, "cancel", "kubernetes:x") == (0, "", "")
    assert Path("said").read_text().endswith("delete mpijob x ")


SCHEDULERS = "cpuft.schedulers cpuft.hosts.slurm cpuft.hosts.mpijob cpuft.schedulers.aws_batch_node"


def test_a_plain_launch_imports_nothing_of_it() -> None:
    """Up to the start of its ranks."""
    code = "import sys; sys.argv = ['cpuft', 'launch', '--np', '1', '--dry-run']\nimport atexit\n"
    code += "import cpuft.launch.remote, cpuft.doctor.examine\nfrom cpuft.cli import main\n"
    code += "atexit.register(lambda: print(*sorted(sys.modules)))\nmain()"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environ["PATH"] = os.defpath
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not {*SCHEDULERS.split(), "yaml", "boto3", "paramiko"} & loaded
    assert {"cpuft.launch.plan", "cpuft.launch.supervise", "cpuft.hosts.cluster"} <= loaded
