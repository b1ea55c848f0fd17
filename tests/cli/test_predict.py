"""`cpuft predict`: what is asked, in one line where that cannot be, and a process of its own that answers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuft.cli.common import compute_settings
from cpuft.cli.predict import check_request, embed_on_hosts, needs_launch, plan_prediction
from cpuft.config.fields import parse_arguments
from cpuft.config.launch import LaunchConfig
from cpuft.config.predict import PredictConfig
from cpuft.errors import CpuftError
from cpuft.launch import attempt
from cpuft.launch.results import NotStoredError
from cpuft.record import read_record
from tests.conftest import GLUE, list_children, needs_glue, run_cpuft
from tests.records import make_record
from tests.report.test_comparison import write_record
from tests.train.tiny import save_tiny, write_rows


def make_run(folder: Path, task: str = "mrpc") -> PredictConfig:
    """A run that has a record, and what looks like a model from afar."""
    write_record(make_record(1, task=task), folder)
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    return PredictConfig(run=str(folder))


@pytest.mark.parametrize(
    "task, asked, message",
    [
        ("mrpc", {}, "--file and --split: neither is given; give one of them to say which examples to predict"),
        (
            "mrpc",
            {"file": "x", "split": "test"},
            "--file and --split: both are given; give one of them to say which examples to predict",
        ),
        ("demo", {"split": "test"}, "--task demo has no test examples: give a file with --file"),
        ("files", {"split": "test"}, "--task files has no test examples: give a file with --file"),
        ("mrpc", {"file": "x", "np": 2}, "--np is for a model that computes embeddings, and this one predicts labels:"),
        (
            "mrpc",
            {"file": "x", "normalize": True},
            "--normalize is for a model that computes embeddings, and this one predicts labels: leave it out",
        ),
        (
            "mrpc",
            {"split": "validation", "id_column": "id"},
            "--id-column names a column of --file: give --file in place of --split, or leave it out",
        ),
        ("chat", {"file": "x", "threshold": "auto"}, "--threshold is for a model that predicts labels, and this one a"),
        ("pairs", {"file": "x", "threshold": "0.4"}, "--threshold is for a model that predicts labels, and this one c"),
        ("pairs", {"split": "validation"}, "a model that computes embeddings needs --file, without --split: give a"),
        (
            "pairs",
            {"file": "x", "with_input": True},
            "--with-input is for a model that predicts labels, and this one computes embeddings: leave it out",
        ),
        ("chat", {"split": "validation"}, "a model that answers prompts needs --file, without --split: give a file"),
        ("chat", {"file": "x", "np": 2}, "--np is for a model that computes embeddings, and this one answers prompts:"),
        (
            "mrpc",
            {"file": "x", "temperature": 0.5},
            "--temperature is for a model that answers prompts, and this one predicts labels: leave it out",
        ),
        (
            "pairs",
            {"file": "x", "max_new_tokens": 5},
            "--max-new-tokens is for a model that answers prompts, and this one computes embeddings: leave it out",
        ),
        (
            "files",
            {"split": "validation", "data_dir": "glue"},
            "--data-dir is for --split of a GLUE task: add --split, or leave out --data-dir",
        ),
        (
            "mrpc",
            {"file": "x", "data_dir": "glue"},
            "--data-dir is for --split of a GLUE task: add --split, or leave out --data-dir",
        ),
    ],
)
def test_requests_that_say_too_little_or_too_much(
    task: str, asked: dict[str, str], message: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", task)
    with pytest.raises(CpuftError) as error:
        check_request(replace(run, **asked), read_record(run.run).header)  # type: ignore[arg-type]
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"hostfile": "hosts"}, "--hostfile is for embeddings; other predictions use this host only: leave it out"),
        ({"check": False}, "--no-check is for embeddings; other predictions use this host only: leave it out"),
    ],
)
def test_hosts_are_for_embeddings(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    run = replace(make_run(tmp_path / "run"), file="x")
    with pytest.raises(CpuftError) as error:
        check_request(run, read_record(run.run).header, LaunchConfig(**options))
    assert str(error.value) == message
    embeddings = replace(make_run(tmp_path / "pairs", "pairs"), file="x")
    check_request(embeddings, read_record(embeddings.run).header, LaunchConfig(**options))


def test_only_options_of_hosts_or_a_job_start_a_launch(tmp_path: Path) -> None:
    assert not needs_launch(LaunchConfig())
    assert not needs_launch(LaunchConfig(np=2))
    assert needs_launch(LaunchConfig(hostfile="hosts"))
    assert needs_launch(LaunchConfig(ppn=1))
    (tmp_path / "hosts").write_text("node1\nnode2\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("K_MPI_JOB_ROLE", "launcher")
        patch.setenv("OMPI_MCA_orte_default_hostfile", str(tmp_path / "hosts"))
        assert not needs_launch(LaunchConfig())
        assert needs_launch(LaunchConfig(np=2))


@pytest.fixture
def texts(tmp_path: Path) -> tuple[str, ...]:
    """Options of embeddings of a tiny model on two ranks of a hostfile, which is this host."""
    save_tiny(tmp_path / "tiny")
    (tmp_path / "texts.csv").write_text("text\n" + "a cat\na dog is here\n" * 1500)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    embeddings = ("--model", "tiny", "--file", "texts.csv", "--precision", "fp32")
    return ("predict", *embeddings, "--hostfile", "hosts", "--np", "2", "--no-check", "--run-dir", "run")


def test_the_plan_of_hosts_is_printed_and_starts_nothing(texts: tuple[str, ...]) -> None:
    done = run_cpuft(*texts, "--output", "out/x.npy", "--dry-run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("'")[1] for line in lines if line.startswith("echo 'cpuft: ")] == [
        "cpuft: make the run folder",
        "cpuft: check the file and the model once, before any rank starts",
        "cpuft: start 2 ranks with intel",
        "cpuft: move the embeddings to out/x.npy",
    ]
    assert sum("cpuft.train.embed_on_hosts" in line for line in lines) == 2
    assert sum("TOKENIZERS_PARALLELISM true" in line for line in lines) == 1
    assert f"--output={Path.cwd()}/run/embeddings.npy" in done.stdout
    assert not Path("run").exists()
    assert not Path("out").exists()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_ranks_of_a_hostfile_write_the_output(texts: tuple[str, ...]) -> None:
    done = run_cpuft(*texts, "--output", "out/x.npy")
    assert (done.returncode, done.stdout) == (0, "embeddings: out/x.npy\n"), done.stderr
    assert done.stderr.lstrip().startswith("3000 texts embedded, ")
    found = np.load("out/x.npy")
    assert found.shape == (3000, 32)
    assert np.abs(found[:2] - found[-2:]).max() < 1e-6
    assert os.listdir("out") == ["x.npy"]
    assert sorted(os.listdir("run")) == ["logs", "plan.sh", "state.json"]
    again = run_cpuft(*texts, "--output", "out/x.npy")
    message = "cpuft: error: out/x.npy exists: give another --output, or replace the file with --overwrite\n"
    assert (again.returncode, again.stderr) == (2, message)
    Path("full").touch()
    other = [*texts[:-1], "other"]
    blocked = run_cpuft(*other, "--output", "full/x.npy")
    assert blocked.returncode == 2
    assert "full/x.npy cannot be written (Not a directory): give another --output" in blocked.stderr
    assert not Path("other").exists()
    wrong = run_cpuft(*other, "--output", "y.npy", "--text-columns", "txt")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "cpuft: error: texts.csv has no column 'txt': did you mean text?\n"
    assert not Path("other").exists()


def test_embeddings_that_cannot_be_stored_are_found_by_hand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launch is replaced by one whose results this machine cannot take, and by one whose file is gone."""

    def fail(*words: Any) -> int:
        raise NotStoredError("continue with --resume")

    (tmp_path / "hosts").write_text("localhost\n")
    asked = PredictConfig(model="tiny", file="x.csv", output="x.npy")
    config = LaunchConfig(hostfile="hosts", check=False, run_dir="run")
    monkeypatch.setattr(attempt, "run_attempt", fail)
    place = f"{tmp_path}/run/embeddings.npy on localhost"
    message = (
        f"{place} could not be fetched, or not be stored in {tmp_path}/run here: check the network and the room here"
    )
    with pytest.raises(NotStoredError, match=re.escape(message)):
        embed_on_hosts(asked, config, False)
    monkeypatch.setattr(attempt, "run_attempt", lambda *words: 0)
    with pytest.raises(SystemExit) as ended:
        embed_on_hosts(asked, config, False)
    assert ended.value.code == 74
    message = f"cpuft: error: {tmp_path}/run/embeddings.npy could not be moved to x.npy: make room there, then move"
    assert capfd.readouterr().err.splitlines()[-1].startswith(message)
    assert os.listdir() == ["hosts"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_a_rank_that_is_killed_ends_the_command(texts: tuple[str, ...]) -> None:
    """Nothing is left of the other rank, nor of the file that it was writing."""
    Path("texts.csv").write_text("text\n" + "a cat\na dog is here\n" * 100_000)
    command = [sys.executable, "-m", "cpuft", *texts, "--output", "x.npy", "--batch-size", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        limit = time.monotonic() + 60
        while not list(Path("run").glob("embeddings.npy.*.new")) and process.poll() is None:
            assert time.monotonic() < limit, "the ranks did not begin to write"
            time.sleep(0.1)
        children = [int(line.split()[0]) for line in list_children() if "embed_on_hosts" in line]
        for child in children:
            if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes():
                os.kill(child, signal.SIGKILL)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (137, ""), errors
    assert "cpuft: rank 1 on localhost failed (killed by signal 9). Last lines of rank 1:" in errors
    assert list_children() == set()
    assert sorted(os.listdir("run")) == ["logs", "plan.sh", "state.json"]
    assert not Path("x.npy").exists()


def test_good_requests(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    header = read_record(run.run).header
    for asked in (replace(run, file="x"), replace(run, split="validation"), replace(run, split="test", data_dir="g")):
        check_request(asked, header)


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ("--file", "x.csv"),
            "there is neither RUN nor --model: give the folder of a run, or name an embedding model",
        ),
        (
            ("run", "--model", "minilm", "--file", "x.csv"),
            "RUN and --model both name the model: leave out one of them",
        ),
        (
            ("none", "--split", "test"),
            "there is no folder none: give the folder of an earlier run, for example runs/mrpc-np2",
        ),
        (
            (".", "--split", "test"),
            ". holds no record.jsonl: give the folder of an earlier run, for example bare",
        ),
        (
            ("bare", "--file", "x.csv"),
            "bare has no folder model, as the run is unfinished or had --no-save-model: give another",
        ),
        (
            ("run", "--file", "x.csv"),
            "run holds no model that was trained here (it is None, and must be a list): give a finished run",
        ),
    ],
)
def test_what_is_no_run_with_a_model_is_said_in_one_line(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    os.utime(tmp_path / "run" / "record.jsonl", (0, 0))  # so that the other run is the newest one
    write_record(make_record(1), tmp_path / "bare")
    done = run_cpuft("predict", *words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"cpuft: error: {message}\n")


def test_the_plan_is_the_process_that_is_started(tmp_path: Path) -> None:
    asked = replace(make_run(tmp_path / "a 'run"), file="rows of mine.csv", batch_size=7, precision="fp32")
    step = plan_prediction(asked, "")
    assert parse_arguments(PredictConfig, step.command[4:]) == asked
    done = run_cpuft("predict", asked.run, "--file", "rows of mine.csv", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "cpuft.train.predict" in done.stdout
    assert not (tmp_path / "a 'run/predictions.csv").exists()


def test_threads_are_a_lone_rank_s_but_for_what_the_user_has_set() -> None:
    settings = {setting.name: setting for setting in compute_settings({"OMP_NUM_THREADS": "1"})}
    assert settings["OMP_NUM_THREADS"].from_user
    assert not {name for name in settings if name.startswith(("CPUFT", "CCL", "I_MPI", "MASTER"))}
    threads = {setting.name: setting.value for setting in compute_settings({})}["OMP_NUM_THREADS"]
    assert 1 <= int(threads) <= len(os.sched_getaffinity(0))


def train_tags(folder: Path, *words: str) -> str:
    """Train on words and their tags; the metrics as the run printed them."""
    data = ["--train-file", write_rows(folder / "train.jsonl", "tags", 96, 0)]
    data += ["--validation-file", write_rows(folder / "validation.jsonl", "tags", 37, 1)]
    done = run_cpuft("launch", "--task", "files", *data, "--run-dir", "run", "--max-length", "32", *words)
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("f1 "))


@pytest.mark.proof
def test_tags_are_learned_and_foretold_from_the_command_line(tmp_path: Path) -> None:
    quick = ("--max-steps", "40", "--learning-rate", "1e-2", "--model", save_tiny(tmp_path / "tiny"))
    metrics = train_tags(tmp_path, *quick)
    assert float(metrics.split()[1]) > 0.5
    done = run_cpuft("predict", "run", "--split", "validation")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{metrics}\npredictions: run/predictions.csv\n"
    assert Path("run/predictions.csv").read_text().startswith("index,token,label,prediction,p_B-ANI,p_B-COL,p_O\n")


@pytest.mark.proof
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_two_ranks_learn_tags_with_the_real_encoder(ranks: str, tmp_path: Path) -> None:
    metrics = train_tags(tmp_path, "--np", ranks, "--epochs", "10", "--learning-rate", "5e-4")
    assert float(metrics.split()[1]) > 0.95
    done = run_cpuft("predict", "run", "--split", "validation")
    assert done.stdout == f"{metrics}\npredictions: run/predictions.csv\n"


@needs_glue
@pytest.mark.proof
def test_mrpc_s_metric_is_foretold_and_its_test_rows_get_glue_s_form() -> None:
    words = ("--task", "mrpc", "--data-dir", str(GLUE), "--max-steps", "40", "--learning-rate", "1e-4")
    launched = run_cpuft("launch", *words, "--run-dir", "run")
    assert launched.returncode == 0, launched.stderr
    done = run_cpuft("predict", "run", "--split", "validation")
    said = next(line for line in launched.stdout.splitlines() if line.startswith("accuracy"))
    assert done.stdout == f"{said}\npredictions: run/predictions.csv\n"
    by_name = run_cpuft("predict", "run", "--file", str(GLUE / "MRPC/dev.tsv"), "--output", "dev.csv")
    assert by_name.stdout == f"{said}\npredictions: dev.csv\n"
    done = run_cpuft("predict", "run", "--split", "test")
    assert (done.returncode, done.stdout) == (0, "predictions: run/MRPC.tsv\n")
    header, *lines = Path("run/MRPC.tsv").read_text().splitlines()
    assert header == "index\tprediction"
    assert [line.split("\t")[0] for line in lines] == [str(number) for number in range(1725)]
    assert {line.split("\t")[1] for line in lines} == {"0", "1"}


def test_a_stopped_prediction_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "files")
    os.mkfifo("rows.csv")  # nobody writes to it: the process waits
    command = [sys.executable, "-m", "cpuft", "predict", "run", "--file", "rows.csv"]
    config = '{"architectures": ["X"], "problem_type": "regression"}'
    Path("run/model/config.json").write_text(config)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 120
    while not any("cpuft.train.predict" in line for line in list_children()):
        assert time.monotonic() < limit, "the process was not started"
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "")
    assert errors == "cpuft: stopped by SIGINT: run the same command again to continue\n"
    assert list_children() == set()
    assert sorted(path.name for path in Path("run").iterdir()) == ["model", "record.jsonl"]
