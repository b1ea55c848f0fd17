"""What `cpuft launch --resume` takes from a run, and what it refuses."""

from __future__ import annotations

import fcntl
import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cpuft.config import LaunchConfig, TrainConfig
from cpuft.errors import CpuftError
from cpuft.launch.plan import plan_training
from cpuft.launch.resume import Resumed, read_resumed
from cpuft.launch.supervise import run_plan
from cpuft.plan import RunPlan, Step
from cpuft.rank.measured import list_measured
from cpuft.record import Line, RecordedRank, ResumedLine, format_line
from cpuft.words import pack_words
from tests.conftest import run_cpuft
from tests.launch.test_planning import make_cluster
from tests.records import make_record, make_steps

TRAIN = TrainConfig(seed=7, batch_size=16)
HEADER = replace(make_record(2).header, options=dict(vars(TRAIN)))


def write_run(run: Path, *lines: Line) -> Path:
    (run / "logs").mkdir(parents=True)
    (run / "record.jsonl").write_text("".join(format_line(line) + "\n" for line in lines))
    return run


def test_options_ranks_and_batch_are_the_runs_own(tmp_path: Path) -> None:
    resumed = read_resumed(str(write_run(tmp_path / "run", HEADER, *make_steps(3, [0.1]))))
    assert resumed == Resumed(str(tmp_path / "run"), TRAIN, 2, 3, 64)
    assert resumed.take_over(LaunchConfig(), TrainConfig(), {}) == (LaunchConfig(np=2), TRAIN)
    given = replace(TrainConfig(), backend="mpi", seed=7)
    config, train = resumed.take_over(LaunchConfig(np=5), given, {"np", "seed", "backend"})
    assert (config.np, train) == (5, replace(TRAIN, backend="mpi"))


@pytest.mark.parametrize(
    "lines, message",
    [
        ((), "has no header: the run ended before its first step"),
        ((HEADER, *make_steps(1, [0.1]), make_record().footer), "is finished, and there is nothing to resume: start"),
        ((replace(HEADER, apart=True),), "measured ranks that train apart, and cannot go on: start it anew"),
    ],
)
def test_runs_with_nothing_to_go_on_with(tmp_path: Path, lines: tuple[Line, ...], message: str) -> None:
    run = write_run(tmp_path / "run", *lines)
    with pytest.raises(CpuftError, match=message):
        read_resumed(str(run))


def test_a_run_that_is_still_going_on(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEADER)
    with (run / "record.jsonl").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CpuftError, match="is still going on: wait for its end, or stop it first"):
            read_resumed(str(run))
    assert read_resumed(str(run)).updates == 0


def test_a_scripts_run_and_trainings_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "script/logs").mkdir(parents=True)
    assert read_resumed(str(tmp_path / "script"), is_script=True) == Resumed(str(tmp_path / "script"))
    with pytest.raises(CpuftError, match=r"holds no record.jsonl"):
        read_resumed(str(tmp_path / "script"))
    with pytest.raises(CpuftError, match="is cpuft's own training, and no script's: leave the script out"):
        read_resumed(str(write_run(tmp_path / "run", HEADER)), is_script=True)


def test_options_that_nobody_can_have_given(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", replace(HEADER, options=dict(vars(TRAIN)) | {"batch_size": "many"}))
    with pytest.raises(CpuftError, match=r"cannot go on, because the record.batch_size is 'many', and must be a whole"):
        read_resumed(str(run))


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEADER)
    told = [run_cpuft("launch", "--resume", str(run), *words) for words in (("--seed", "8"), ("--run-dir", "x"))]
    assert [done.returncode for done in told] == [2, 2]
    assert told[0].stderr == f"cpuft: error: {run} was started with --seed 7, not 8: leave --seed out\n"
    said = "--resume and --run-dir both name the folder of the run: leave --run-dir out"
    assert told[1].stderr == f"cpuft: error: {said}\n"


def test_the_plan_goes_on_in_the_runs_folder_and_keeps_its_logs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEADER)
    resumed = Resumed(str(run), TRAIN, 2, 3, 64)
    plan = plan_training(make_cluster((2,)), LaunchConfig(np=2), TRAIN, str(run), "lines", {}, resumed=resumed)
    ((ranks,),), ((make,),) = plan.ranks, plan.make
    assert {"--resume=3", "--global-batch=64"} <= set(ranks.command)
    assert "CPUFT_RESUMED" in ranks.command
    for number in (1, 2):
        (run / "logs" / f"of-start-{number}").touch()
        subprocess.run(make.command, check=True)
    assert sorted(path.name for path in run.iterdir()) == ["logs", "logs-1", "logs-2", "record.jsonl"]
    assert [path.name for path in (run / "logs-2").iterdir()] == ["of-start-2"]


@pytest.mark.parametrize("ranks, told", [((2,), True), ((1, 1), True), ((1, 1, 1), False)])
def test_what_was_measured_holds_between_hosts_that_the_run_had(
    tmp_path: Path, ranks: tuple[int, ...], told: bool
) -> None:
    """One of the third start's was new: node3."""
    again = ResumedLine(3, 0, 1, [RecordedRank(0, "node2", [0])], "gloo", "fp32", "", "2026")
    resumed = read_resumed(str(write_run(tmp_path / "run", HEADER, again)))
    plan = plan_training(make_cluster(ranks), LaunchConfig(np=sum(ranks)), TRAIN, "r", "lines", {}, resumed=resumed)
    words = {word for stage in plan.ranks for step in stage for word in step.command if "--measured=" in word}
    measured = json.dumps(asdict(list_measured(HEADER))) if told else ""
    assert words == set(pack_words([f"--measured={measured}"]))


def test_a_refusal_before_ranks_start_leaves_the_run_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEADER)
    refused = Step("prepare", ("sh", "-c", "echo 'cpuft: error: no such rows' >&2; exit 2"))
    plan = RunPlan(prepare=((refused,),), ranks=((Step("ranks", ("true",)),),), resumed=True)
    with pytest.raises(CpuftError, match="no such rows"):
        run_plan(plan, str(run), ("localhost",), {}, 0.0, make_cluster((1,)).access.transport)
    assert (run / "record.jsonl").exists()
