"""`cpuft sweep` from the command line."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpuft.cli.common import say
from cpuft.cli.sweep import show_status, sweep
from cpuft.record import read_record
from cpuft.sweep.study import (
    DONE,
    FILE_NAME,
    PRUNED,
    Attempt,
    SweepSettings,
    create_sweep,
    open_sweep,
    read_sweep,
)
from tests.conftest import Golden, call_cpuft, run_cpuft
from tests.provision.simulated import simulate
from tests.train.tiny import save_tiny

TINY = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
TPE = ("--search", "tpe", "--trials", "3", "--learning-rate", "1e-5..1e-3")


def create(folder: Path, **settings: Any) -> None:
    """Write a sweep of one run that has not begun."""
    create_sweep(str(folder), replace(SweepSettings(["--task=demo"], 1), **settings), True, [{"seed": "1"}])


SHORT = ("--task", "demo", "--max-steps", "2", "--batch-size", "4", "--precision", "fp32", "--no-save-model")


NO_SWEEP: Any = None


class Terminal(io.StringIO):
    """A terminal that can be read."""

    def isatty(self) -> bool:
        return True


def test_the_state_is_drawn_below_what_is_printed_and_removed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuft.sweep.queue.format_status", lambda *_: "1 run" + 299 * "." + "\nbest [0]")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with show_status(NO_SWEEP, 1) as draw:
        draw()
        draw()
        say("run 1 of 2 [b]ended: 7")
    shown = terminal.getvalue()
    assert shown.count("1 run" + 75 * "." + "\n") == 3
    first, _, rest = shown.partition("run 1 of 2 [b]ended: 7\n")
    assert (first.count("best [0]"), rest.count("best [0]")) == (1, 2)
    assert rest.endswith("\x1b[2K")


def test_without_a_terminal_no_state_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    with show_status(NO_SWEEP, 1) as draw:
        draw()
    assert log.getvalue() == ""


def test_a_dry_run_prints_the_launch_of_each_run(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "hosts").write_text("a1\na2\n")
    (tmp_path / "conditions.yaml").write_text("- lora-rank: 0\n- lora-rank: 8,16\n  learning-rate: 3e-4\n")
    done = run_cpuft(
        *("sweep", "--hostfile", str(tmp_path / "hosts"), "--no-check", "--task", "files", "--seed", "1..2"),
        *("--conditions", str(tmp_path / "conditions.yaml"), "--run-dir", str(tmp_path / "s"), "--dry-run"),
        *("--train-file", "a.csv", "--text-columns", "a,b", "--no-fast-path", "--ranks-per-host", "2"),
    )
    assert done.returncode == 0, done.stderr
    golden("sweep.sh", done.stdout.replace(str(tmp_path), "/work"))
    assert not (tmp_path / "s").exists()


def test_a_dry_run_names_the_sweep_in_trackers(tmp_path: Path) -> None:
    words = ("sweep", "--task", "demo", "--seed", "1,2", "--run-dir", str(tmp_path / "s"))
    done = run_cpuft(*words, "--report-to", "wandb", "--dry-run", settings={"TRACKIO_PROJECT": "mine"})
    assert done.returncode == 0, done.stderr
    assert "at the same time on: this machine" in done.stdout
    exported = [line for line in done.stdout.splitlines() if line.startswith("export")]
    assert exported == ["export WANDB_RUN_GROUP=s", "export MLFLOW_EXPERIMENT_NAME=s"]
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--train-file", "a,b", "--learning-rate", "1e-5,x"), "--learning-rate"),
        (("--seed", "3..1"), "--seed '3..1' is an empty range"),
        (("--learning-rate", "1e-5..1e-3"), "is a range of numbers with fractions, which has no grid"),
        (("--seed", "1..20000"), "this sweep has more than 10,000 runs: give fewer values"),
        (("--search", "random"), "--search random needs --trials"),
        (("--trials", "3"), "--trials is for --search random"),
        (("--search", "tpe", "--seed", "1,2"), "--search tpe needs --trials"),
        (("--sampler", "random"), "leave out what cpuft does not have: --sampler (--search is tpe or random"),
        (("--storage", "sqlite:///a.db"), "leave out what cpuft does not have: --storage (optuna-dashboard reads"),
        (("--pruner", "median", "--seed", "1,2"), "--pruner median compares evaluations while training, and there are"),
        ((*TPE, "--pruner", "median"), "--pruner median compares evaluations while training, and there are none"),
        ((*TPE[:-1], "1e-5,1e-4"), "the values allow 2 configurations, fewer than --trials 3: give a range"),
        ((*TPE[:-1], "1e-3..1e-5"), "--learning-rate '1e-3..1e-5' is an empty range"),
        ((*TPE, "--warmup-ratio", "0.1..0.2", "--lr-schedule", "constant"), "--lr-schedule constant has no warm-up"),
        (
            ("--task", "mrpc", "--model", "a/b", "--lora-rank=-1,0,1", "--base-precision", "bf16", *TPE[:4]),
            "lora-rank 0: --base-precision changes nothing by itself: add --lora-rank 16",
        ),
        (("--task", "mrpc,nothing"), "--task"),
        (
            ("--task", "mrpc,rte"),
            "--task mrpc,rte: metrics of different tasks cannot be compared",
        ),
        (
            ("--task", "mrpc", "--train-file", "a.csv"),
            "the only configuration: --train-file has no effect with --task mrpc",
        ),
        (
            ("--task", "demo", "--data-dir", "glue", "--seed", "1,2"),
            "seed 1: --data-dir has no effect with --task demo",
        ),
        (("--parallel", "auto"), "--parallel 'auto' is not valid: give a whole number of 0 or more"),
        (("--parallel", "-1"), "--parallel '-1' is not valid"),
        (("--conditions", "none.yaml"), "there is no file none.yaml, which --conditions names"),
        (("--hosts-per-run", "2"), "--hosts-per-run 2 needs hosts: name them"),
        (("--resume", "none"), "there is no sweep.jsonl in"),
        (("--resume", "none", "--seed", "1"), "--seed is not for --resume, which takes it from the sweep"),
        (("status",), "cpuft sweep takes no arguments but `status FOLDER`"),
        (("status", "none"), "there is no sweep.jsonl in none"),
        (("--warmup-ratio", "0.1", "--lr-schedule", "cosine,constant"), "lr-schedule constant: --lr-schedule constant"),
    ],
)
def test_bad_input_gets_one_line(words: tuple[str, ...], problem: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, warned = call_cpuft(capfd, "sweep", *words)
    assert code == 2
    assert problem in warned
    assert len(warned.splitlines()) == 1


def test_a_dry_run_of_a_search_prints_its_first_configuration_and_stores_nothing(
    tmp_path: Path, golden: Golden
) -> None:
    options = ("--seed", "1,2", "--eval-every", "10", "--search-seed", "3")
    done = run_cpuft("sweep", "--task", "mrpc", *TPE, *options, "--run-dir", str(tmp_path / "s"), "--dry-run")
    assert done.returncode == 0, done.stderr
    golden("sweep-optuna.sh", done.stdout.replace(str(tmp_path), "/work"))
    assert not [*tmp_path.iterdir()]


def test_a_dry_run_of_random_draws_prints_all_of_them(tmp_path: Path) -> None:
    words = ("sweep", "--search", "random", "--trials", "3", "--learning-rate", "1e-5..1e-3", "--seed", "1,2")
    done = run_cpuft(*words, "--run-dir", str(tmp_path / "s"), "--dry-run")
    assert done.returncode == 0, done.stderr
    launches = [line.split() for line in done.stdout.splitlines() if line.startswith("cpuft launch")]
    assert [words[-1].rpartition("/")[2] for words in launches] == [f"run-{run}" for run in range(1, 7)]
    assert len({word for words in launches for word in words if word.startswith("--learning-rate")}) == 3


def test_a_sweep_that_divided_this_machine_continues_on_all_hosts_of_a_cluster(tmp_path: Path) -> None:
    """The division of the machine on which it began does not apply to other hosts."""
    (tmp_path / "hosts").write_text("a1\na2\na3\n")
    create(tmp_path / "s", parallel=4)
    done = run_cpuft("sweep", "--resume", str(tmp_path / "s"), "--hostfile", str(tmp_path / "hosts"), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "at the same time on: a1; a2; a3\n" in done.stdout


def test_a_resumed_sweep_trains_as_many_runs_at_a_time_as_before(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a1\na2\na3\n")
    create(tmp_path / "s", launch=[f"--hostfile={tmp_path}/hosts", "--no-check"], parallel=2)
    done = run_cpuft("sweep", "--resume", str(tmp_path / "s"), "--dry-run")
    assert "at the same time on: a1; a2\n" in done.stdout
    done = run_cpuft("sweep", "--resume", str(tmp_path / "s"), "--parallel", "1", "--dry-run")
    assert "at the same time on: a1\n" in done.stdout


def test_a_sweep_that_is_resumed_in_another_folder_finds_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options that are given now name files from here."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, host in ((old, "a1"), (new, "b1")):
        (folder / "bin").mkdir(parents=True)
        (folder / "hosts").write_text(f"{host}\n")
        (folder / "bin" / "mpirun").touch()
        (folder / "ssh").touch()
    launch = [f"--hostfile={old}/hosts", "--no-check", "--iface=hosts"]
    create(old / "s", launch=launch, working_folder=str(old))
    monkeypatch.chdir(new)
    resume = ("sweep", "--resume", str(old / "s"), "--dry-run")
    done = run_cpuft(*resume)
    assert done.returncode == 0, done.stderr
    assert "at the same time on: a1\n" in done.stdout
    assert f"cpuft launch --hostfile={old}/hosts --no-check --iface=hosts" in done.stdout
    done = run_cpuft(*resume, "--hostfile", "hosts", "--mpirun", "./bin/mpirun", "--ssh-config", "ssh")
    assert "at the same time on: b1\n" in done.stdout
    assert f"--hostfile={new}/hosts --ssh-config={new}/ssh --mpirun={new}/bin/mpirun --task=demo" in done.stdout
    # A name is looked up on PATH, and a path that is not here may be one on the hosts.
    assert "--mpirun=mpirun " in run_cpuft(*resume, "--mpirun", "mpirun").stdout
    assert "--mpirun=mpi/mpirun " in run_cpuft(*resume, "--mpirun", "mpi/mpirun").stdout


def test_a_new_sweep_stores_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts").write_text("a1\n")
    (tmp_path / "lab").touch()
    given = list[str]()
    monkeypatch.setattr("cpuft.cli.sweep._carry_out", lambda folder, config, options, places: given.extend(options))
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ("--seed", "1,2", "--hostfile", "hosts", "--ssh-config", "~/lab", "--run-dir", "s")
    sweep.main(words, standalone_mode=False)
    assert read_sweep("s").settings.launch == [f"--hostfile={Path.cwd()}/hosts"]
    assert f"--ssh-config={tmp_path}/lab" in given


def test_a_sweep_that_runs_on_another_host_is_active(tmp_path: Path) -> None:
    """Only the lock of its journal shows that: its other lock contains the name of that host."""
    create(tmp_path / "s")
    with open_sweep(str(tmp_path / "s")) as begun:
        begun.note(begun.runs[0], Attempt("node1", "run-1", time.time()))
    text = (tmp_path / "s" / FILE_NAME).read_text()
    with (tmp_path / "s" / FILE_NAME).open("r+") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        told = run_cpuft("sweep", "status", str(tmp_path / "s")).stdout
        refused = run_cpuft("sweep", "--resume", str(tmp_path / "s"))
    assert told.startswith("1 run: 0 done, 1 running, 0 queued, 0 failed")
    assert "no cpuft sweep works on these runs now" not in told
    said = f"another cpuft sweep is working on {tmp_path}/s, here or on another host: wait until it has ended, or stop"
    assert (refused.returncode, refused.stderr) == (2, f"cpuft: error: {said} it, and try again\n")
    assert (tmp_path / "s" / FILE_NAME).read_text() == text
    assert "no cpuft sweep works on these runs now" in run_cpuft("sweep", "status", str(tmp_path / "s")).stdout


def test_a_sweep_of_an_earlier_version_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / FILE_NAME).write_text('{"kind": "sweep", "version": 2, "options": [], "runs": []}\n')
    for words in (("sweep", "--resume"), ("sweep", "status"), ("report",)):
        done = run_cpuft(*words, str(tmp_path / "s"))
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert "sweep.jsonl is not a sweep of this version of cpuft" in done.stderr
        assert "start the sweep anew, or continue it with the version that began it" in done.stderr


def test_only_sweeps_need_optuna() -> None:
    told = "import sys, cpuft.cli.sweep, cpuft.cli.report, cpuft.cli; print('optuna' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.real
@pytest.mark.proof
def test_a_search_on_this_machine_prunes_a_run(tmp_path: Path) -> None:
    """The first run trains to its end. Then the file says that five runs were much better, so the next is pruned."""
    folder, config = tmp_path / "s", tmp_path / "tiny.json"
    config.write_text(json.dumps(TINY))
    tiny = (f"--from-config={config}", "--tokenizer=minilm")
    words = ("--eval-every", "1", "--search", "tpe", "--learning-rate", "1e-5..1e-3", "--trials", "1")
    done = run_cpuft("sweep", *SHORT, *tiny, *words, "--run-dir", str(folder), seconds=600)
    assert done.returncode == 0, done.stderr
    (one,) = read_sweep(str(folder)).configurations
    assert {*one.curve} == {1}
    assert one.value == one.runs[0].attempts[-1].metrics["accuracy"]
    options = ["--task=demo", "--max-steps=300", "--batch-size=4", "--precision=fp32", "--no-save-model"]
    search: dict[str, Any] = {
        "search": "tpe",
        "trials": 6,
        "pruner": "median",
        "spaces": [{"learning_rate": "1e-5..1e-3"}],
    }
    other = tmp_path / "t"
    create_sweep(str(other), SweepSettings([*options, *tiny, "--eval-every=1"], **search), True)
    with open_sweep(str(other)) as begun:
        for _ in range(5):
            one = begun.choose_next()
            start = Attempt("this machine", f"run-{one.runs[0].number}", 0.0)
            begun.note(one.runs[0], start)
            begun.note_evaluation(one, 1, 2.0)
            begun.note(one.runs[0], replace(start, status=DONE, seconds=1.0, metrics={"accuracy": 2.0}))
            begun.conclude(one)
    done = run_cpuft("sweep", "--resume", str(other), seconds=600)
    assert done.returncode == 0, done.stderr
    assert re.search(r"run 6 of 6 was pruned after \d+ s: accuracy [0-9.]+ after \d+ updates, and no", done.stderr)
    assert [run.number for run in read_sweep(str(other)).list_runs(PRUNED)] == [6]
    told = run_cpuft("sweep", "status", str(other)).stdout
    assert "6 runs: 5 done, 0 running, 0 queued, 0 failed, 1 pruned" in told
    assert "1 run pruned, because their evaluations were worse: 6" in run_cpuft("report", str(other)).stdout


@pytest.mark.real
def test_a_sweep_on_this_machine(tmp_path: Path) -> None:
    """Two runs at a time, each on one CPU; the loss of one of them becomes NaN."""
    folder = tmp_path / "sweep"
    done = run_cpuft(
        *("sweep", *SHORT, "--learning-rate", "1e-4,1e30", "--run-dir", str(folder), "--parallel", "2"),
        *("--model", save_tiny(tmp_path / "tiny"), "--max-length", "32"),
        seconds=300,
    )
    assert done.returncode == 1, done.stderr
    assert re.search(r"run 1 of 2 ended after \d+ s: accuracy 0\.\d+ \(the best until now\)", done.stderr), done.stderr
    assert [run.number for run in read_sweep(str(folder)).list_runs(DONE)] == [1]
    assert read_sweep(str(folder)).settings.parallel == 2
    assert "failed: run 2 (learning-rate 1e30): the loss is " in " ".join(done.stdout.split())
    assert run_cpuft("sweep", "status", str(folder)).stdout.startswith("2 runs: 1 done, 0 running, 0 queued, 1 failed")
    told = json.loads(run_cpuft("report", str(folder), "--json").stdout)
    assert [one["options"] for one in told["configurations"]] == [{"learning_rate": "1e-4"}]
    assert told["failed"] == [{"learning_rate": "1e30"}]
    assert json.loads(run_cpuft("report", str(folder), "--metric", "f1", "--json").stdout)["metric"] == "f1"
    refused = run_cpuft("report", str(folder), "--metric", "f2")
    assert (refused.returncode, "has reported --metric f2: did you mean f1?" in refused.stderr) == (2, True)
    refused = run_cpuft("report", str(folder / "run-1"), "--metric", "f1")
    assert (refused.returncode, "--metric is for the folder of a sweep" in refused.stderr) == (2, True)
    refused = run_cpuft("report", str(folder), "--markdown")
    assert (refused.returncode, "is a sweep: show it alone" in refused.stderr) == (2, True)


@pytest.mark.real
@pytest.mark.clusters
@pytest.mark.proof
def test_the_run_of_a_killed_host_moves_to_another(tmp_path: Path) -> None:
    """Three hosts, six short runs; one host is killed while it trains, mostly before a checkpoint was copied."""
    with simulate(tmp_path, "--nodes", "3", "--cores-per-node", "0.5") as cluster:
        words = ("--cluster", cluster.name, "--task", "demo", "--max-steps", "6", "--precision", "fp32")
        command = [sys.executable, "-m", "cpuft", "sweep", *words, "--learning-rate", "1e-4,3e-4,1e-3", "--seed", "1,2"]
        environ = dict(os.environ) | {"CPUFT_STATE": str(tmp_path / "state")}
        process = subprocess.Popen(
            [*command, "--run-dir", "s"],
            cwd=tmp_path,
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        while not (tmp_path / "s" / "run-2" / "plan.sh").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        assert cluster.cpuft("provision", "local", "kill", "2", "--name", cluster.name).returncode == 0
        output, errors = process.communicate(timeout=900)
        assert process.returncode == 0, errors
        assert re.search("it (continues|starts again from the beginning) on another host", errors), errors
        assert len(read_sweep(str(tmp_path / "s")).list_runs(DONE)) == 6
        assert "6 of 6 runs done" in output


@pytest.mark.real
@pytest.mark.clusters
@pytest.mark.proof
def test_a_run_with_a_copied_checkpoint_continues_on_another_host(tmp_path: Path) -> None:
    """One run on one of two hosts, which is killed: the other host continues it to the same metric and losses."""
    training = ("--task", "demo", "--max-steps", "120", "--batch-size", "4", "--precision", "fp32", "--no-save-model")
    with simulate(tmp_path, "--nodes", "2", "--cores-per-node", "0.5") as cluster:
        for number in (1, 2):  # so that no host sees the checkpoints of the other one
            cluster.on(number, "mount -t tmpfs -o mode=1777 tmpfs /var/tmp")
        words = ("--cluster", cluster.name, *training, "--checkpoint-every", "1")
        environ = dict(os.environ) | {"CPUFT_STATE": str(tmp_path / "state")}
        process = subprocess.Popen(
            [sys.executable, "-m", "cpuft", "sweep", *words, "--seed", "3", "--run-dir", "s"],
            cwd=tmp_path,
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        log = tmp_path / "s" / "logs" / "run-1.log"
        while not list((tmp_path / "s" / "run-1" / "checkpoints").glob("*.0")):
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        assert cluster.cpuft("provision", "local", "kill", "1", "--name", cluster.name).returncode == 0
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        told = re.search(r"it continues on another host after update (\d+), from the copy of its checkpoint", errors)
        assert told, errors
        moved = read_record(str(tmp_path / "s" / "run-1"))
        assert [line.step for line in moved.resumptions] == [int(told[1])]
        assert not (tmp_path / "s" / "run-1" / "checkpoints").exists()
        places = [attempt.place for attempt in read_sweep(str(tmp_path / "s")).runs[0].attempts]
        assert places == [host.name for host in cluster.hosts]
        alone = ("--only-hosts", places[1], "--seed", "3", "--run-dir", "undisturbed")
        command = [sys.executable, "-m", "cpuft", "launch", *words, *alone]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        undisturbed = read_record(str(tmp_path / "undisturbed"))
        assert moved.metrics == undisturbed.metrics != {}
        assert [line.loss for line in moved.steps] == [line.loss for line in undisturbed.steps]
