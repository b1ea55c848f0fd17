"""The script of a job of Slurm's, run by the shell that Slurm would run it with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.schedulers.base import JobLaunch
from cpuft.schedulers.slurm import Slurm, SlurmOptions
from tests.conftest import Golden
from tests.schedulers.programs import AWKWARD_MORE, SAY, add_program, make_launch, run_script, told_of, words_said
from tests.test_plans import AWKWARD

SITE = SlurmOptions(
    name="mrpc-np8",
    partition="cpu",
    account="nlp",
    constraint="amx&icelake",
    time="8:00:00",
    extra="--qos=high --mem=0",
)
render = Slurm().render
PROGRAM = "/opt/cpuft/env/bin/cpuft"
JOB = JobLaunch(("--np", "8", "--ppn", "2", "--task", "mrpc", "--seed", "1"), np=8, ppn=2)


def test_the_script(golden: Golden) -> None:
    golden("submit-slurm.sh", render(SITE, JOB, PROGRAM))


def test_the_script_of_an_array(golden: Golden) -> None:
    launch = JobLaunch(("--np", "4", "--run-dir", "my runs/x"), ("--", "train.py", "it's"), np=4, run_dir="my runs/x")
    golden("submit-slurm-array.sh", render(replace(SITE, array="0-3", nodes=2), launch, "cpuft"))


@pytest.mark.parametrize("value", [*AWKWARD, *AWKWARD_MORE])
def test_every_word_arrives_as_it_is(value: str) -> None:
    done = run_script("bash", render(SlurmOptions(name="x"), make_launch(value), add_program("cpuft", SAY)))
    assert (done.returncode, done.stderr) == (0, "")
    assert words_said() == told_of(value)


def test_jobs_of_an_array_have_a_run_each() -> None:
    number = {"SLURM_JOB_ID": "73", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}
    text = render(SlurmOptions(name="x", array="0-3"), make_launch("a"), add_program("cpuft", SAY))
    assert run_script("bash", text, **number).returncode == 0
    assert words_said() == told_of("a", end=("--run-dir", "runs/x-3"))


@pytest.mark.parametrize("value", [*AWKWARD, *AWKWARD_MORE])
def test_no_word_becomes_an_option_of_slurm(value: str) -> None:
    lines = render(SlurmOptions(name="x"), replace(make_launch(value), run_dir=value), value).splitlines()
    # sbatch reads options until the first line that is no comment.
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert lines[:first] == render(SlurmOptions(name="x"), JobLaunch((), np=2), "cpuft").splitlines()[:first]


@pytest.mark.parametrize(
    "value", ["a b", "a\n#SBATCH --uid=0", "a'b", 'a"b', "a\\b", "a#b", "$HOME", "`id`", "ä", "\t"]
)
@pytest.mark.parametrize("option", ["name", "partition", "account", "constraint", "time", "array"])
def test_options_that_would_need_quotes_are_refused(option: str, value: str) -> None:
    with pytest.raises(CpuftError, match=r"cannot stand in a job script: write --name=value"):
        render(SlurmOptions(**(vars(SITE) | {option: value})), JOB, PROGRAM)


@pytest.mark.parametrize("extra", ["--a 'b c'", "a", "--a=b c", "--a='b#'", "-", "$(id)"])
def test_so_are_more_options(extra: str) -> None:
    with pytest.raises(CpuftError, match=r"cannot stand in a job script"):
        render(replace(SITE, extra=extra), JOB, PROGRAM)


def test_a_name_that_is_a_path_is_refused() -> None:
    with pytest.raises(CpuftError, match=r"^--name 'a/b': the log of the job has this name, so leave out '/'$"):
        render(replace(SITE, name="a/b"), JOB, PROGRAM)


def test_more_options_without_an_end() -> None:
    with pytest.raises(CpuftError, match=r"^--extra cannot be read \(No closing quotation\): write '--name=value"):
        render(replace(SITE, extra="--a='b"), JOB, PROGRAM)


@pytest.mark.parametrize(
    "np, ppn, nodes, hosts, ranks",
    [
        (8, 0, 0, 8, 1),
        (8, 2, 0, 4, 2),
        (7, 2, 0, 4, 2),
        (6, 4, 0, 2, 4),
        (8, 0, 3, 3, 3),
        (8, 4, 2, 2, 4),
        (8, 4, 4, 4, 4),
        (1, 0, 0, 1, 1),
    ],
)
def test_hosts_and_ranks(np: int, ppn: int, nodes: int, hosts: int, ranks: int) -> None:
    assert JobLaunch((), np=np, ppn=ppn).count_hosts(nodes) == (hosts, ranks)


@pytest.mark.parametrize(
    "np, ppn, nodes, said",
    [
        (2, 0, 4, "--nodes 4 contradicts --np 2 and --ppn 0: leave --nodes out"),
        (8, 2, 3, "--nodes 3 contradicts --np 8 and --ppn 2: leave --nodes out"),
    ],
)
def test_hosts_that_cannot_be(np: int, ppn: int, nodes: int, said: str) -> None:
    with pytest.raises(CpuftError) as refusal:
        JobLaunch((), np=np, ppn=ppn).count_hosts(nodes)
    assert str(refusal.value) == said


ANEW, ON = ["--run-dir", "runs/x"], ["--resume", "runs/x", "--run-dir", ""]
TRAINING, SCRIPT = JobLaunch(()), JobLaunch((), ("--", "a.py"))


@pytest.mark.parametrize(
    "launch, count, files, told",
    [
        (TRAINING, "", {}, ANEW),
        (TRAINING, "", {"record.jsonl": "{}", "logs/a": "b"}, ANEW),  # somebody else's: the launch refuses it
        (TRAINING, "0", {"record.jsonl": "{}", "logs/a": "b"}, ANEW),
        (TRAINING, "1", {}, ANEW),
        (TRAINING, "1", {"record.jsonl": "{}", "logs/a": "b"}, ON),
        (TRAINING, "12", {"record.jsonl": "{}", "logs/a": "b"}, ON),
        (TRAINING, "1", {"record.jsonl": "", "other": "c"}, ANEW),
        (SCRIPT, "", {"logs/a": "b"}, ANEW),
        (SCRIPT, "1", {}, ANEW),
        (SCRIPT, "1", {"logs/a": "b"}, ON),
        (JobLaunch((), run_dir="my runs/x"), "1", {}, ["--run-dir", "my runs/x"]),
        (JobLaunch(("--resume", "runs/x"), resume="runs/x"), "1", {"record.jsonl": "{}"}, []),
    ],
)
def test_what_came_far_enough_goes_on(launch: JobLaunch, count: str, files: dict[str, str], told: list[str]) -> None:
    for name, text in files.items():
        path = Path("runs/x", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    text = render(SlurmOptions(name="x"), launch, add_program("cpuft", SAY))
    assert run_script("bash", text, SLURM_JOB_ID="7", SLURM_RESTART_COUNT=count).returncode == 0
    assert words_said() == ["launch", *launch.options, *told, *launch.script]
    assert {name: Path("runs/x", name).read_text() for name in files} == files


def test_a_start_that_came_to_nothing_is_put_aside() -> None:
    for name in ("logs/rank-0.err", "record.jsonl"):
        path = Path("runs/x", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    text = render(SlurmOptions(name="x"), TRAINING, add_program("cpuft", SAY))
    assert run_script("bash", text, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1").returncode == 0
    assert words_said() == ["launch", *ANEW]
    (kept,) = Path("runs").iterdir()
    assert kept.name.startswith("x-")
    assert (kept / "logs/rank-0.err").exists()


LAUNCH = """trap 'exit 75' USR1 TERM
[ -z "$SEND" ] || { kill -"$SEND" "$PPID"; for i in $(seq 600); do sleep 0.1; done; }
exit "$CODE"
"""
"""Ends as asked; or has its job's shell told something, and ends with 75 once it is told itself."""


@pytest.mark.parametrize(
    "send, code, more, ended, queued",
    [
        ("", "0", {}, 0, ""),
        ("", "2", {}, 2, ""),
        ("", "137", {}, 137, ""),
        ("", "75", {}, 75, "requeue 7\n"),
        ("USR1", "0", {}, 75, "requeue 7\n"),
        ("TERM", "0", {}, 75, ""),
        ("USR1", "0", {"SLURM_RESTART_COUNT": "1"}, 75, "requeue 7\n"),
        ("USR1", "0", {"SLURM_RESTART_COUNT": "2"}, 75, ""),
        ("USR1", "0", {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "0"}, 75, "requeue 70_0\n"),
    ],
)
def test_what_can_be_gone_on_with_is_queued_again(
    send: str, code: str, more: dict[str, str], ended: int, queued: str
) -> None:
    assert run_job(TRAINING, LAUNCH, SEND=send, CODE=code, **more) == (ended, queued, "")


def run_job(launch: JobLaunch, program: str, **environ: str) -> tuple[int, str, str]:
    """The script where `program` is cpuft: its exit code, and what it said, scontrol's words among that."""
    add_program("scontrol", 'echo "$@"\n')
    text = render(SlurmOptions(name="x", retries=2), launch, add_program("cpuft", program))
    done = run_script("bash", text, SLURM_JOB_ID="7", **environ)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "launch, files, ended, queued",
    [
        (TRAINING, [], 75, "requeue 7\n"),
        (TRAINING, ["record.jsonl"], 138, ""),
        (TRAINING, ["record.jsonl", "checkpoints/4"], 75, "requeue 7\n"),
        (SCRIPT, [], 75, "requeue 7\n"),
        (SCRIPT, ["logs/rank-0.out"], 138, ""),
        (JobLaunch((), resume="runs/x"), ["record.jsonl", "checkpoints/4"], 75, "requeue 7\n"),
        (JobLaunch((), resume="runs/x"), ["record.jsonl"], 138, ""),
    ],
)
def test_a_launch_that_is_told_before_it_has_ranks_is_queued_again(
    launch: JobLaunch, files: list[str], ended: int, queued: str
) -> None:
    """Its own signal ends it: nobody asks ranks yet, or between two starts."""
    for name in files:
        path = Path("runs/x", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    assert run_job(launch, 'kill -USR1 "$PPID"\nexec sleep 60\n') == (ended, queued, "")
