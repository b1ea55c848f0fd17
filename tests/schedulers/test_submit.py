"""`cpuft submit`: what is submitted, and how answers are shown. Stand-ins replace the schedulers' programs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from cpuft.cli import main
from cpuft.errors import CpuftError
from cpuft.record import Writer
from cpuft.schedulers import base, parse_job
from cpuft.schedulers.base import SWEEP_FILE_NAME, follow_job, read_template, run_client
from cpuft.sweep.study import FILE_NAME, SweepSettings, create_sweep
from tests.records import make_record
from tests.schedulers.programs import SAY, add_program, run_script, words_said

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
        (("slurm", "--name", "x"), "sbatch", "12;gpu", "slurm:gpu/12"),
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


SWEEP = ("sweep", "--task", "mrpc,sst2", "--seed=1..5", "--mpirun", "my mpirun", "--no-check", "--parallel=2")


@pytest.mark.parametrize(
    "journal, restarted, said",
    [
        (None, "", [*SWEEP, "--run-dir", "runs/s"]),
        (None, "1", [*SWEEP, "--run-dir", "runs/s"]),
        ("", "1", [*SWEEP, "--run-dir", "runs/s"]),
        (
            "{}",
            "1",
            ["sweep", "--resume", "runs/s", "--parallel=2", "--mpirun=my mpirun", "--no-check"],
        ),
    ],
)
def test_a_job_runs_a_sweep_and_its_next_start_continues_it(
    capsys: pytest.CaptureFixture[str], journal: str | None, restarted: str, said: list[str]
) -> None:
    """With --resume, a sweep takes only the options that say where its runs train."""
    code, text, errors = run(capsys, "slurm", "--nodes", "3", "--name", "s", "--dry-run", "--", *SWEEP)
    assert (code, errors) == (0, "")
    assert "#SBATCH --nodes=3\n#SBATCH --ntasks-per-node=1\n" in text
    if journal is not None:
        Path("runs/s").mkdir(parents=True)
        Path("runs/s/sweep.jsonl").write_text(journal)
    own = add_program("cpuft", SAY)
    text = re.sub("(?m)^cpuft=.* retries", f"cpuft={own} retries", text)
    done = run_script("bash", text, SLURM_JOB_ID="7", SLURM_RESTART_COUNT=restarted)
    assert (done.returncode, done.stderr) == (0, "")
    assert words_said() == said
    if journal == "":  # the folder was moved aside, because a new sweep needs a new one
        assert [path.name.partition("-")[0] for path in Path("runs").iterdir()] == ["s"]
        assert not Path("runs/s").exists()


@pytest.mark.parametrize("code, ended", [("75", 75), ("138", 75), ("1", 1), ("143", 143)])
def test_a_job_is_queued_again_when_its_sweep_was_interrupted(
    capsys: pytest.CaptureFixture[str], code: str, ended: int
) -> None:
    _, text, _ = run(capsys, "slurm", "--nodes", "3", "--name", "s", "--dry-run", "--", *SWEEP)
    Path("runs/s").mkdir(parents=True)
    Path("runs/s/sweep.jsonl").write_text("{}")
    add_program("scontrol", 'echo "$@"\n')
    text = re.sub("(?m)^cpuft=.* retries", f"cpuft={add_program('cpuft', f'exit {code}')} retries", text)
    done = run_script("bash", text, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")
    assert (done.returncode, done.stdout) == (ended, "requeue 7\n" * (ended == 75))


def test_a_sweep_that_is_continued_from_the_beginning_of_its_job(capsys: pytest.CaptureFixture[str]) -> None:
    create_sweep("runs/old", SweepSettings(["--task=demo"], 1), True, [{"seed": "1"}])
    words = ("sweep", "--resume", "runs/old", "--parallel", "2")
    _, text, _ = run(capsys, "slurm", "--nodes", "3", "--dry-run", "--", *words)
    text = re.sub("(?m)^cpuft=.* retries", f"cpuft={add_program('cpuft', SAY)} retries", text)
    assert run_script("bash", text, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1").returncode == 0
    assert words_said() == list(words)


@pytest.mark.parametrize("more", [(), ("--resume", "runs/old")])
def test_a_sweep_that_would_end_in_its_job_is_not_submitted(
    more: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("slurm", "--nodes", "3", "--", "sweep", *more)
    if more:
        said = "cpuft: error: there is no sweep.jsonl in runs/old: give the folder that "
        code, _, errors = run(capsys, *words)
        assert (code, errors.startswith(said)) == (2, True)
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, errors = run(capsys, *words)
    assert (code, errors.startswith("cpuft: error: sweeps are stored by Optuna, which is not installed: ")) == (2, True)
    # A container has its own packages.
    assert run(capsys, "kubernetes", *IMAGE, "--nodes", "3", "--dry-run", "--", "sweep", *more)[0] == 0


def test_kubernetes_takes_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("sweep", "--task", "mrpc", "--seed", "1..3", "--hosts-per-run", "2", "--ranks-per-host", "4")
    code, text, _ = run(capsys, "kubernetes", *IMAGE, "--name", "s", "--nodes", "6", "--dry-run", "--", *words)
    assert code == 0
    manifest = yaml.safe_load(text)["spec"]
    assert manifest["slotsPerWorker"] == 4
    assert manifest["mpiReplicaSpecs"]["Worker"]["replicas"] == 6
    (container,) = manifest["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    script = container["command"][2].replace("$$", "$")
    add_program("cpuft", SAY)
    assert run_script("sh", script).returncode == 0
    assert words_said() == [*words, "--run-dir", "runs/s"]


def write_run(folder: str, ranks: int, hosts: int) -> None:
    """Write the record of an interrupted run."""
    record = make_record(ranks, hosts)
    with Writer(folder) as writer:
        writer.write(record.header)


@pytest.mark.parametrize(
    "words, ranks_per_host, directives",
    [
        ((), 1, "--nodes=8\n#SBATCH --ntasks-per-node=1\n"),
        ((), 4, "--nodes=2\n#SBATCH --ntasks-per-node=4\n"),
        (("--nodes", "4"), 4, "--nodes=4\n#SBATCH --ntasks-per-node=2\n"),
        (("--nodes", "4"), 1, "--nodes=4\n#SBATCH --ntasks-per-node=2\n"),
    ],
)
def test_a_job_that_resumes_a_run_has_hosts_for_its_recorded_ranks(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], ranks_per_host: int, directives: str
) -> None:
    write_run("runs/x", 8, 8 // ranks_per_host)
    code, text, errors = run(capsys, "slurm", *words, "--dry-run", "--", "launch", "--resume", "runs/x")
    assert (code, errors) == (0, "")
    assert directives in text
    assert "#SBATCH --job-name=demo-np8-" in text


def test_options_of_a_resumed_launch_replace_the_recorded_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    write_run("runs/x", 8, 2)
    resume = ("--dry-run", "--", "launch", "--resume", "runs/x")
    assert "--nodes=4\n#SBATCH --ntasks-per-node=2\n" in run(capsys, "slurm", *resume, "--ppn", "2")[1]
    assert "--nodes=6\n#SBATCH --ntasks-per-node=1\n" in run(capsys, "slurm", *resume, "--np", "6")[1]
    # The folder in the container is not the one here.
    assert "slotsPerWorker: 3\n" in run(capsys, "kubernetes", *IMAGE, *resume, "--np", "6", "--ppn", "3")[1]
    code, _, errors = run(capsys, "kubernetes", *IMAGE, "--nodes", "4", *resume)
    assert code == 2
    assert errors.startswith("cpuft: error: the ranks of the run in runs/x cannot be read here: add --np N ")


def test_a_job_that_resumes_a_sweep_has_hosts_for_its_runs(capsys: pytest.CaptureFixture[str]) -> None:
    settings = SweepSettings(["--task=demo", "--np=6", "--ppn=3"], 1, hosts_per_run=2)
    create_sweep("s", settings, True, [{"seed": "1"}])
    resume = ("--dry-run", "--", "sweep", "--resume", "s")
    assert "--nodes=4\n#SBATCH --ntasks-per-node=3\n" in run(capsys, "slurm", "--nodes", "4", *resume)[1]
    said = "cpuft: error: --nodes 1 is less than --hosts-per-run 2: raise --nodes\n"
    assert run(capsys, "slurm", "--nodes", "1", *resume) == (2, "", said)


def test_the_journal_has_the_name_that_job_scripts_look_for() -> None:
    assert SWEEP_FILE_NAME == FILE_NAME
    assert f'"$progress" = {FILE_NAME}' in read_template("slurm.sh")


def test_a_job_without_a_name_gets_one(capsys: pytest.CaptureFixture[str]) -> None:
    _, shown, _ = run(capsys, "slurm", "--dry-run", "--", "launch", "--np", "4", "--", "a b.py")
    assert "\n#SBATCH --job-name=script-np4-" in shown


@pytest.mark.parametrize(
    "words, said",
    [
        (("slurm",), "no launch is given: write it at the end, e.g. -- launch --np 8 --task mrpc"),
        (("slurm", "--", "compare"), "no launch is given: write it at the end, e.g. -- launch --np 8 --task mrpc"),
        (("slurm", "--", "launch", "--tsk", "a"), "there is no option --tsk: did you mean --task? (see cpuft launch"),
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
        (
            ("slurm", "--nodes", "4", "--", "launch", "--resume", "runs/x"),
            "the ranks of the run in runs/x cannot be read here: add --np N",
        ),
        (("slurm", "--", "launch", "--iface", "\udc80"), "the launch contains bytes that are not UTF-8, which no"),
        (("slurm", "--", "sweep", "--task", "mrpc"), "a sweep needs --nodes N: --hosts-per-run times"),
        (
            ("slurm", "--nodes", "2", "--", "sweep", "--hosts-per-run", "3"),
            "--nodes 2 is less than --hosts-per-run 3: raise --nodes",
        ),
        (
            ("slurm", "--nodes", "2", "--array", "0-1", "--", "sweep"),
            "a sweep trains its runs in one job, and --array submits several jobs: leave out --array",
        ),
        (
            ("slurm", "--array", "0-3", "--", "launch", "--np", "2", "--resume", "runs/x"),
            "all jobs of --array would resume runs/x: submit a job for each run instead",
        ),
        (("slurm", *LAUNCH, "--detach"), "a job goes on when you log out: leave out --detach"),
        (
            ("slurm", *LAUNCH, "--cluster", "lab"),
            "the launch of a job uses the hosts of the job: leave out --cluster",
        ),
        (
            ("slurm", "--nodes", "2", "--", "sweep", "--cluster", "lab"),
            "the sweep of a job uses the hosts of the job: leave out --cluster",
        ),
        (("slurm", "--nodes", "2", "--", "sweep", "status", "x"), "a job runs a sweep, and has no status to show:"),
        (("slurm", "--nodes", "2", "--", "sweep", "--dry-run"), "--dry-run is an option of cpuft submit: write it bef"),
        (("slurm", "--nodes", "2", "--", "sweep", "--sead", "1"), "there is no option --sead"),
        (("slurm", "--nodes", "2", "--", "sweep", "--iface", "\udc80"), "the sweep contains bytes that are not UTF-8"),
        (
            ("batch", *IMAGE, "--queue", "q", "--nodes", "2", "--", "sweep"),
            "cpuft submit batch takes no sweep: use slurm or kubernetes",
        ),
        (("dstack", *IMAGE, "--nodes", "2", "--", "sweep"), "cpuft submit dstack takes no sweep: use slurm"),
        (("skypilot", *IMAGE, "--", "sweep"), "cpuft submit skypilot takes no sweep: use slurm"),
        (("slurm", "--array", "0-3", "--wait", *LAUNCH), "--wait follows one job: leave it out with --array"),
        (
            ("slurm", "--partitoin", "a", *LAUNCH),
            "there is no option --partitoin: did you mean --partition? (see",
        ),
        (("slurm", "--nodes", "3", *LAUNCH), "--nodes 3 contradicts --np 2 and --ppn 0: leave --nodes out"),
        (("slurm", "--partition", "a b", *LAUNCH), "'--partition=a b' cannot stand in a job script: write"),
        (("slurm", "--config", "none.yaml", *LAUNCH), "there is no file none.yaml, which --config names: "),
        (("kubernetes", *LAUNCH), "no container image is given: add --image NAME, an image that has cpuft and sshd"),
        (
            ("kubernetes", *IMAGE, "--name", "a_b", *LAUNCH),
            "--name 'a_b': use at most 54 small letters, digits",
        ),
        (
            ("kubernetes", *IMAGE, *LAUNCH, "--config", "options.yaml"),
            "the job's containers lack the file of --config: write its options after -- launch",
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
    Path("options.yaml").write_text("batch-size: 8\n")
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


def test_a_log_that_cannot_be_read_now_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_slurm("RUNNING")
    Path("x 12.out").write_text("step 1\n")

    def fail(path: Path, **how: str) -> str:
        raise OSError(116, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "read_text", fail)
    assert run(capsys, "status", "slurm:12") == (0, "slurm:12 RUNNING\n", "")


def test_a_slurm_job_is_cancelled(capsys: pytest.CaptureFixture[str]) -> None:
    add_slurm("RUNNING")
    add_program("scancel", SAY)
    assert run(capsys, "cancel", "slurm:12_3") == (0, "", "")
    assert words_said() == ["12_3"]


def test_a_job_of_another_slurm_cluster_keeps_its_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    add_program("sbatch", "echo '12;other'\n")
    add_slurm("PENDING", reason="PartitionNodeLimit")
    code, output, errors = run(capsys, "slurm", "--extra=--clusters=other", "--wait", *LAUNCH)
    assert (code, output) == (2, "slurm:other/12\n")
    assert "cpuft submit cancel slurm:other/12, then" in errors
    assert words_said() == ["--clusters=other", "show", "job", "12"]
    add_program("scancel", SAY)
    assert run(capsys, "cancel", "slurm:other/12") == (0, "", "")
    assert words_said() == ["--clusters=other", "12"]


FOREIGN = "cpuft: error: {} was not submitted by cpuft submit: end it with the scheduler's own"
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


def test_a_log_is_followed_over_restarts_and_failures_of_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Path("x 12.out")
    turns: Iterator[Callable[[], object]] = iter(
        [
            lambda: add_slurm("RUNNING"),
            lambda: log.write_text("step 1\n"),
            lambda: add_program("scontrol", "exit 1\n"),
            lambda: add_slurm("PENDING", "75:0"),
            lambda: log.write_text("step 1\nstep 2\n"),
            lambda: log.write_text(""),
            lambda: log.write_text("step 1\nstep 2\n"),
            lambda: log.write_text("anew\n"),
            lambda: add_slurm("COMPLETED"),
        ]
    )
    add_slurm("PENDING")
    said: list[str] = []
    monkeypatch.setattr(base, "time", SimpleNamespace(sleep=lambda seconds: next(turns)()))
    assert follow_job(*parse_job("slurm:12"), said.append) == 0
    assert "".join(said) == "step 1\nstep 2\nanew\n"


def test_following_ends_when_the_scheduler_does_not_answer_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(base, "time", SimpleNamespace(sleep=pauses.append))
    with pytest.raises(CpuftError, match=r"^scontrol failed \(no such program: scontrol\)"):
        follow_job(*parse_job("slurm:12"), print)
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
    assert Path("said").read_text().count("--namespace=n ") == 3 + (not conditions)


def test_a_kubernetes_job_is_cancelled(capsys: pytest.CaptureFixture[str]) -> None:
    add_program("kubectl", KUBECTL.replace("LOGS", "exit 1").replace("OWNER", "cpuft"))
    assert run(capsys, "cancel", "kubernetes:x") == (0, "", "")
    assert Path("said").read_text().endswith("delete mpijob x ")


SCHEDULERS = "cpuft.schedulers cpuft.schedulers.job_node"


def test_a_plain_launch_imports_nothing_of_it() -> None:
    """Up to the start of its ranks."""
    code = "import sys; sys.argv = ['cpuft', 'launch', '--np', '1', '--dry-run']\nimport atexit\n"
    code += "import cpuft.launch.attempt, cpuft.doctor.examine\nfrom cpuft.cli import main\n"
    code += "atexit.register(lambda: print(*sorted(sys.modules)))\nmain()"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environ["PATH"] = os.defpath
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not {*SCHEDULERS.split(), "yaml", "boto3", "paramiko"} & loaded
    assert {"cpuft.launch.plan", "cpuft.launch.supervise", "cpuft.hosts.cluster"} <= loaded


def test_a_client_that_takes_too_long_may_have_made_the_job() -> None:
    with pytest.raises(CpuftError, match=r"timed out after 0.1 seconds\): what was asked may have been done"):
        run_client(sys.executable, "-c", "import time; time.sleep(60)", seconds=0.1)
