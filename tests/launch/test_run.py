"""Real runs: mpirun, two ranks on this machine, the pretrained encoder, real data."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from cpuft.comm.compression.powersgd import EXACT_UPDATES
from cpuft.config.launch import LaunchConfig, ScriptConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.hosts.cluster import LOCAL
from cpuft.launch.resume import HostCopy, ResumedRun
from cpuft.launch.run import LaunchRequest, plan_request
from cpuft.launch.run_state import FINISHED
from cpuft.record import Record, read_record
from tests.conftest import GLUE, list_children, needs_glue, run_cpuft, wait_until
from tests.records import make_state
from tests.train.tiny import save_tiny

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
DEMO = ("--task", "demo", "--max-train-samples", "128", "--max-steps", "4", "--batch-size", "16")
SHORT = (*DEMO, "--max-length", "16")  # evaluating is most of the time of such a run
MRPC = ("--task", "mrpc", "--data-dir", str(GLUE))


def launch(*words: str, **settings: str) -> Record:
    """Run a launch that must succeed in ./run, and return its record."""
    done = run_cpuft("launch", "--run-dir", "run", *words, settings=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_record("run")


@pytest.mark.parametrize(
    "copy, is_on_host_disk",
    [
        (HostCopy(LOCAL, exists=True, state=make_state(phase=FINISHED)), True),
        (HostCopy(LOCAL, exists=True), True),
        (HostCopy(LOCAL), False),
    ],
    ids=["finished", "interrupted", "in the run folder"],
)
def test_a_resumed_run_stays_on_the_disk_of_the_host_where_it_began(
    copy: HostCopy, is_on_host_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine is the only host that answers."""
    finished_on = LOCAL.name if copy.is_finished else ""
    resumed = ResumedRun(str(tmp_path / "run"), host_copies=(copy,), finished_on=finished_on)
    monkeypatch.setattr("cpuft.launch.run.gather_resumed_run", lambda *given: resumed)
    request = LaunchRequest(LaunchConfig(np=1), TrainConfig(), ScriptConfig(), ("true",), "run", frozenset(), "lines")
    with ExitStack() as sessions:
        planned = plan_request(request, {}, print, None, sessions)
    assert planned.cluster.works_remotely == is_on_host_disk
    assert len(planned.plan.results) == 2 * is_on_host_disk


def test_more_ranks_than_the_run_has_are_refused_before_anything_starts() -> None:
    config = LaunchConfig(np=1, min_np=2)
    request = LaunchRequest(config, TrainConfig(), ScriptConfig(), ("true",), "", frozenset(), "lines")
    with ExitStack() as sessions, pytest.raises(CpuftError, match="--min-np 2 is more than --np 1: lower --min-np"):
        plan_request(request, {}, print, None, sessions)


def test_a_run_without_a_compiler_says_that_it_is_slower(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for path in Path("/usr/bin").iterdir():
        if "++" not in path.name:
            (tools / path.name).symlink_to(path)
    job = (*SHORT, "--max-steps", "1", "--model", save_tiny(tmp_path / "tiny"))
    done = run_cpuft("launch", "--run-dir", "run", "--np", "1", *job, settings={"PATH": str(tools)})
    assert done.returncode == 0, done.stderr
    assert read_record("run").header.kernels == "absent"
    host = read_record("run").header.hosts[0]
    (line,) = [line for line in done.stderr.splitlines() if "kernels" in line]
    assert line == (
        f"warning: the compiled kernels are not used on {host} (no C++ compiler; install one (Debian: apt-get install "
        "g++)): training without them is slower, on x86-64 2 to 3 times"
    )


@needs_glue
@pytest.mark.proof
def test_one_rank_and_two_have_the_same_losses_on_mrpc(tmp_path: Path) -> None:
    exact = ("--precision", "fp32", "--dropout", "0", "--max-steps", "6", "--learning-rate", "1e-4", "--no-save-model")
    one = launch("--np", "1", "--batch-size", "32", *MRPC, *exact)
    (tmp_path / "run").rename(tmp_path / "one")
    two = launch("--np", "2", "--batch-size", "16", *MRPC, *exact)
    (tmp_path / "run").rename(tmp_path / "two")
    micro = launch("--np", "2", "--batch-size", "8", "--gradient-accumulation", "2", *MRPC, *exact)
    losses = [[line.loss for line in record.steps] for record in (one, two, micro)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert losses[2] == pytest.approx(losses[0], abs=1e-4)
    assert losses[0][0] != pytest.approx(losses[0][5], abs=1e-4)
    assert two.metrics == pytest.approx(one.metrics, abs=0.01)


@pytest.mark.proof
def test_every_backend_has_the_losses_of_gloo(tmp_path: Path) -> None:
    losses = {}
    for backend in ("gloo", "mpi", "ccl"):
        record = launch("--np", "2", *DEMO, "--precision", "fp32", "--no-save-model", "--backend", backend)
        (tmp_path / "run").rename(tmp_path / backend)
        assert record.header.backend == backend
        losses[backend] = [line.loss for line in record.steps]
    assert losses["mpi"] == pytest.approx(losses["gloo"], abs=1e-5)
    assert losses["ccl"] == pytest.approx(losses["gloo"], abs=1e-5)


@pytest.mark.proof
def test_compressed_gradients_are_half_the_bytes(tmp_path: Path) -> None:
    # Plain, because the fast path's gradients are bf16 to begin with.
    words = ("--np", "2", *DEMO, "--no-fast-path", "--no-save-model", "--backend", "gloo", "--grad-compression")
    whole = launch(*words, "none")
    (tmp_path / "run").rename(tmp_path / "whole")
    half = launch(*words, "bf16")
    ratios = [b.bytes_sent / a.bytes_sent for a, b in zip(whole.steps, half.steps)]
    assert ratios[1:] == pytest.approx([0.5] * 3, abs=0.01)
    (tmp_path / "run").rename(tmp_path / "half")
    factors = launch(*words, "powersgd", "--max-steps", "12")
    assert all(c.bytes_sent <= b.bytes_sent for b, c in zip(half.steps, factors.steps))
    # The first updates send blocks. The rows of an update may be counted in the next one.
    sent = [step.bytes_sent for step in factors.steps[EXACT_UPDATES + 1 :]]
    assert max(sent) < half.steps[-1].bytes_sent / 4


@pytest.mark.proof
def test_only_adapters_are_exchanged_and_their_folder_is_a_model(tmp_path: Path) -> None:
    whole = launch("--np", "2", *DEMO, "--no-save-model", "--backend", "gloo")
    (tmp_path / "run").rename(tmp_path / "whole")
    adapted = launch("--np", "2", *DEMO, "--lora-rank", "16", "--backend", "gloo")
    assert all(b.bytes_sent < 0.03 * a.bytes_sent for a, b in zip(whole.steps, adapted.steps, strict=True))
    (tmp_path / "run").rename(tmp_path / "adapted")
    kept = {path.name for path in (tmp_path / "adapted/model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= kept
    assert "model.safetensors" not in kept
    again = launch("--np", "1", *DEMO, "--model", "adapted/model", "--lora-rank", "8", "--lora-merge")
    assert again.footer is not None
    assert {path.name for path in (tmp_path / "run/model").iterdir()} >= {"model.safetensors", "config.json"}


@pytest.mark.proof
def test_local_updates_end_with_equal_parameters() -> None:
    record = launch("--np", "2", *DEMO, "--no-save-model", "--sync-every", "3")
    assert record.footer is not None
    sent = [line.bytes_sent > 1e6 for line in record.steps]
    assert sent == [False, False, True, True]


@pytest.mark.proof
def test_a_sharded_optimizer_leaves_a_complete_model() -> None:
    bf16 = ("--precision", "bf16", "--emulate-bf16")
    record = launch("--np", "2", *DEMO, *bf16, "--shard", "optimizer", "--backend", "mpi", "--checkpoint-every", "0.01")
    assert record.footer is not None
    assert record.footer.checksum
    assert record.metrics

    import torch
    from safetensors.torch import load_file

    weight = load_file("run/model/model.safetensors")["bert.encoder.layer.0.output.dense.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())


@pytest.mark.proof
def test_the_choice_of_a_backend_is_reused(tmp_path: Path) -> None:
    first = launch("--np", "2", *DEMO, "--no-save-model", XDG_CACHE_HOME=str(tmp_path / "cache"))
    (remembered,) = (tmp_path / "cache/cpuft").glob("backend-*.json")
    assert json.loads(remembered.read_text())["backend"] == first.header.backend
    said = Path("run/logs/rank-0.err").read_text()
    assert f"gradients over {first.header.backend}: all-reduce of 1 MiB takes" in said


def test_bench_measures_all_backends() -> None:
    words = ("--backends", "auto,gloo,mpi,ccl", "--sizes", "1024,65536", "--dtypes", "float32", "--run-dir", "bench")
    earlier = set(os.listdir("/dev/shm"))
    done = run_cpuft("bench", "comm", "--np", "2", *words)
    assert done.returncode == 0, done.stderr
    assert len(Path("bench/comm.jsonl").read_text().splitlines()) == 9
    # What other tests use at the same time goes with them; what these ranks had left would stay.
    left = set(os.listdir("/dev/shm")) - earlier
    wait_until(lambda: left.isdisjoint(os.listdir("/dev/shm")), f"of {left}, some stay in /dev/shm", seconds=240)
    assert run_cpuft("bench", "comm", "--np", "2", "--backends", "gluu").returncode == 2


@pytest.mark.proof
def test_two_jobs_on_the_same_cores_both_finish() -> None:
    # With CCL_YIELD=sched_yield nothing else ran on Linux 6.18 for a minute, kernel threads included.
    words = ["--np", "2", "--backends", "ccl", "--sizes", "1048576,26214400", "--dtypes", "float32", "--rounds", "9"]
    jobs = [
        subprocess.Popen([sys.executable, "-m", "cpuft", "bench", "comm", *words, "--run-dir", name], text=True)
        for name in ("left", "right")
    ]
    gaps, last = [], time.monotonic()
    while any(job.poll() is None for job in jobs):
        time.sleep(0.01)
        gaps.append(-last + (last := time.monotonic()))
    assert [job.returncode for job in jobs] == [0, 0]
    assert max(gaps) < 5


@pytest.mark.proof
def test_the_printed_plan_trains_too(tmp_path: Path) -> None:
    plan = run_cpuft("launch", "--np", "2", "--dry-run", "--run-dir", "run", *DEMO)
    assert list(tmp_path.iterdir()) == []
    done = subprocess.run(["bash"], input=plan.stdout, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert read_record("run").footer is not None
    assert f"cpuft: start 2 ranks with intel's mpirun; output of rank N: {tmp_path}/run/logs/rank-N.out" in done.stderr
    again = subprocess.run(["bash"], input=plan.stdout, capture_output=True, text=True, timeout=60)
    assert again.returncode == 1
    assert f"{tmp_path}/run" in again.stderr.splitlines()[-1]
    assert "File exists" in again.stderr
    assert read_record("run").footer is not None


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ("--task", "mrpc", "--data-dir", "none"),
            "--data-dir none does not exist: give the folder that contains MRPC/train.tsv",
        ),
        (
            ("--model", "./none"),
            "there is no folder ./none: give --model the folder or the hub name of a model",
        ),
        (
            ("--task", "files"),
            "--task files needs --train-file: give a file with texts and labels",
        ),
    ],
)
def test_bad_data_starts_no_rank_and_leaves_nothing(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = run_cpuft("launch", "--np", "2", "--run-dir", "run", "--no-check", *words)
    assert (done.returncode, done.stderr, done.stdout) == (2, f"cpuft: error: {message}\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_time_limit() -> None:
    done = run_cpuft("launch", "--run-dir", "run", "--time-limit", "1", "--", "sleep", "60", seconds=55)
    assert done.returncode == 2
    assert "the run was stopped at its time limit (1 s passed): raise --time-limit" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", "small"], check=True)
    try:
        done = run_cpuft("launch", "--run-dir", "small/run", *DEMO)
    finally:
        subprocess.run(["umount", "small"], check=True)
    assert done.returncode == 2
    assert (
        "is full (1 MB free, a run needs 256 MB): make room, or give a folder on another disk with --run-dir"
        in done.stderr
    )


@pytest.mark.parametrize(
    "number, code",
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.proof),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.proof),
        (signal.SIGKILL, -9),
    ],
)
def test_a_stopped_launch_leaves_no_process_and_a_record_that_reads(number: int, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cpuft", "launch", "--np", "2", "--run-dir", "run", "--epochs", "500"]
    command += ["--model", save_tiny(tmp_path / "tiny"), "--max-length", "32", "--backend", "gloo"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    path = Path("run/record.jsonl")
    wait_until(lambda: path.exists() and path.read_text().count('"kind": "step"') >= 2)
    process.send_signal(number)
    if number == signal.SIGINT:  # the first one asks for a checkpoint
        time.sleep(0.2)
        process.send_signal(number)
    assert process.wait(5) == code
    wait_until(lambda: not list_children(), "a process is left")
    assert process.stdout is not None
    assert (b"all ranks are gone" in process.stdout.read()) == (number != signal.SIGKILL)
    record = read_record("run")
    assert len(record.steps) >= 2
    assert record.footer is None


def test_ctrl_c_ends_a_script_without_a_handler_as_in_a_terminal() -> None:
    Path("script.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(100)\n")
    command = [sys.executable, "-m", "cpuft", "launch", "--np", "1", "--run-dir", "run", "--", "script.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    assert "KeyboardInterrupt" in Path("run/logs/rank-0.err").read_text()


@pytest.mark.proof
def test_the_demo_learns_with_its_defaults() -> None:
    record = launch("--np", "2", "--task", "demo", "--no-save-model")
    assert record.header.options["learning_rate"] == 1e-4
    assert record.metrics["accuracy"] >= 0.95
