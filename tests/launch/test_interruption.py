"""A training that is interrupted and resumed ends with the same result as an undisturbed one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cpuft.comm.compression.powersgd import EXACT_UPDATES
from cpuft.judge.predictions import read_predictions
from cpuft.record import FILE_NAME, read_record
from tests.conftest import run_cpuft, wait_until
from tests.rank.metadata import serve_metadata
from tests.train.tiny import save_tiny

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")

WORDS = ("launch", "--np", "2", "--backend", "gloo", "--no-save-model")
SIZE = ("--max-steps", "40", "--batch-size", "4", "--max-length", "32", "--max-train-samples", "64")
TEXT = "\n".join(f"line {number} of a book that nobody wrote, and few will read" for number in range(400))

SCRIPT = """
import sys, time, torch, torch.distributed as dist
from cpuft.rank.interruption import is_interrupted
dist.init_process_group("gloo")
told = torch.zeros(1)
while not told:
    time.sleep(0.05)
    told += is_interrupted()
    dist.all_reduce(told)
sys.exit(75)
"""


@pytest.mark.parametrize(
    "job, stop",
    [
        pytest.param(("--task", "demo"), signal.SIGINT, marks=pytest.mark.proof),
        pytest.param(("--task", "text", "--train-file", "book.txt"), signal.SIGUSR1, marks=pytest.mark.proof),
    ],
    ids=["demo-Ctrl-C", "text-SIGUSR1"],
)
def test_a_resumed_training_equals_an_undisturbed_one(
    job: tuple[str, ...], stop: signal.Signals, tmp_path: Path
) -> None:
    Path("book.txt").write_text(TEXT)
    own = (*WORDS, *job, *SIZE)
    words = [sys.executable, "-m", "cpuft", *own, "--run-dir", "run", "--checkpoint-every", "0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        wait_until(Path("run/logs/rank-0.err").exists)
        process.send_signal(stop)
        said = process.communicate(timeout=200)[1].rstrip().splitlines()[-1]
    assert process.returncode == 75, said
    done = run_cpuft("launch", "--resume", "run")
    assert done.returncode == 0, done.stderr
    undisturbed = run_cpuft(*own, "--run-dir", "whole")
    assert undisturbed.returncode == 0, undisturbed.stderr
    record, whole = read_record("run"), read_record("whole")
    ((update, repeated),) = [(line.step, line.repeated) for line in record.resumptions]
    how = f"cpuft: the run was interrupted by {stop.name} after update {update} of 40"
    assert said == f"{how}: continue with cpuft launch --resume {tmp_path}/run"
    assert 0 < update < 40
    assert repeated == 0
    assert [line.loss for line in record.steps] == [line.loss for line in whole.steps]
    assert record.footer
    assert whole.footer
    assert record.footer.checksum == whole.footer.checksum
    assert not Path("run/checkpoints").exists()


def count_updates(run: str) -> int:
    """The updates that a run has recorded until now."""
    return len(read_record(run).steps) if Path(run, FILE_NAME).exists() else 0


def test_late_embedding_rows_are_finished_before_a_stop(tmp_path: Path) -> None:
    updates = 400  # Two fast cores made 80 before the notice reached the ranks.
    model = ("--model", save_tiny(tmp_path / "tiny"))
    own = (*WORDS, "--task", "demo", *SIZE, *model, "--max-steps", str(updates), "--grad-compression", "powersgd")
    words = [sys.executable, "-m", "cpuft", *own, "--run-dir", "run", "--checkpoint-every", "0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: count_updates("run") >= EXACT_UPDATES + 3)
        process.send_signal(signal.SIGUSR1)
        said = process.communicate(timeout=200)[1].rstrip().splitlines()[-1]
    assert process.returncode == 75, said
    stopped = count_updates("run")
    assert EXACT_UPDATES + 3 <= stopped < updates
    done = run_cpuft("launch", "--resume", "run")
    assert done.returncode == 0, done.stderr
    record = read_record("run")
    assert record.footer
    assert [(line.step, line.repeated) for line in record.resumptions] == [(stopped, 0)]
    assert [line.step for line in record.steps] == list(range(1, updates + 1))
    kept = read_predictions("run")
    assert kept.about.step == updates
    assert (kept.column("label") == kept.column("prediction")).mean() == record.metrics["accuracy"]


def test_a_script_sees_an_interruption_notice_and_the_launch_returns_its_75(tmp_path: Path) -> None:
    Path("script.py").write_text(SCRIPT)
    with serve_metadata(404, 200) as metadata:
        words = ("--run-dir", "run", "--interruption-notice", metadata.url, "--", "script.py")
        done = run_cpuft("launch", "--np", "2", *words, seconds=200)
    assert done.returncode == 75
    command = f"cpuft launch --resume {tmp_path}/run -- python {tmp_path}/script.py"
    assert done.stderr.splitlines()[-1] == f"cpuft: the ranks ended with exit code 75: continue with {command}"
