"""A user's script on two ranks: its environment and arguments, and how it ends."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import GLUE, PEERS, needs_glue, run_cpuft

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")


def write_script(text: str) -> str:
    Path("script.py").write_text(text, encoding="utf-8")
    return "script.py"


LOOKS = """
import glob, hashlib, json, os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(value)
secrets = {name: os.environ[name] for name in ("CPUFT_RUN_KEY", "OPENAI_API_KEY")}
def holds_secret(path):
    try:
        text = open(path, "rb").read()
        return any(secret.encode() in text for secret in secrets.values())
    except OSError:  # a folder, or ended meanwhile
        return False
places = glob.glob("/proc/[0-9]*/cmdline") + glob.glob(os.environ["CPUFT_RUN_DIR"] + "/**", recursive=True)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR")
print(value.item(), *sys.argv[1:], *(os.environ[name] for name in names), len(os.sched_getaffinity(0)))
print(list(filter(holds_secret, places)), len(secrets["CPUFT_RUN_KEY"]), len(secrets["OPENAI_API_KEY"]))
print(hashlib.sha256(secrets["CPUFT_RUN_KEY"].encode()).hexdigest())
dist.destroy_process_group()
"""


def test_a_script_finds_its_ranks_and_secrets_in_the_environment() -> None:
    """All ranks have the secret key of the run, and no secret is in any output or command line."""
    script, secret = write_script(LOOKS), {"OPENAI_API_KEY": "hunter2-hunter2"}
    plan = run_cpuft("launch", "--dry-run", "--", script, settings=secret)
    assert "OPENAI_API_KEY" in plan.stdout
    assert "hunter2" not in plan.stdout + plan.stderr
    done = run_cpuft("launch", "--np", "2", "--run-dir", "run", "--", script, "--lr", "a b", settings=secret)
    assert done.returncode == 0, done.stderr
    told = [Path(f"run/logs/rank-{rank}.out").read_text().splitlines() for rank in (0, 1)]
    assert done.stdout.splitlines()[:3] == told[0]
    assert [lines[0] for lines in told] == [f"3.0 --lr a b {rank} 2 {rank} 2 1 127.0.0.1 1" for rank in (0, 1)]
    assert [lines[1] for lines in told] == ["[] 64 15"] * 2
    assert told[0][2] == told[1][2]


SHOW = "import json, sys; print(json.dumps(sys.argv[1:]))"
WORDS = [":", "-n", "1", "touch", "x", "-genv", "%r", "", "a\nb", "a'; echo foo", "$HOME", "-m", 'json:"a"', "\udcff"]


def test_a_script_gets_its_arguments_unchanged(tmp_path: Path) -> None:
    done = run_cpuft(
        "launch", "--np", "2", "--independent", "--run-dir", "50%rate:%h", "--", write_script(SHOW), *WORDS
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{json.dumps(WORDS)}\nrun: {tmp_path}/50%rate:%h\n"
    assert Path("50%rate:%h/logs/rank-1.out").read_text() == f"{json.dumps(WORDS)}\n"
    done = run_cpuft("launch", "--run-dir", "run", "--", "echo", *WORDS[:5])
    assert done.stdout.splitlines()[0] == ": -n 1 touch x"
    assert not Path("x").exists()


AGAIN = """
import os, signal, sys
print(os.environ.get("CPUFT_RESUMED", "0"), flush=True)
if sys.argv[1] == "raises": raise ValueError("odd")
if sys.argv[1] == "killed" and "CPUFT_RESUMED" not in os.environ: os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "fault, code, starts, line",
    [
        (
            "killed",
            0,
            ["0\n", "1\n"],
            "restart 1 of 3: rank 0 on localhost was killed by SIGKILL; 1 rank on",
        ),
        (
            "raises",
            1,
            ["0\n", "1\n"],
            "rank 0 on localhost failed (exit code 1), the same error as before",
        ),
    ],
)
def test_a_killed_script_is_restarted_and_the_same_error_ends_it(
    fault: str, code: int, starts: list[str], line: str
) -> None:
    done = run_cpuft("launch", "--max-restarts", "3", "--run-dir", "run", "--", write_script(AGAIN), fault, seconds=60)
    assert done.returncode == code, done.stderr
    assert [path.read_text() for path in sorted(Path("run").glob("logs*/rank-0.out"), reverse=True)] == starts
    assert line in done.stderr
    assert "was rejected" not in done.stderr


STOPS_MPIRUN = """
import os, signal, subprocess
from pathlib import Path
def read_parent(process): return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
proxy = read_parent(os.getppid())
os.kill(proxy, signal.SIGSTOP)
command, closed = f"sleep 2; kill -CONT {proxy}", subprocess.DEVNULL
subprocess.Popen(["sh", "-c", command], start_new_session=True, stdin=closed, stdout=closed, stderr=closed)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_reason_of_a_failure_is_kept_if_mpirun_is_too_busy_to_read_it_at_once() -> None:
    """Hydra's proxy drops what a rank printed if it finds the request to end the ranks beside it."""
    done = run_cpuft("launch", "--max-restarts", "0", "--run-dir", "run", "--", write_script(STOPS_MPIRUN), seconds=60)
    assert "rank 0 on localhost failed (killed by signal 9)" in done.stderr


LEAVES = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(32, 2))
for _ in range(20):
    model(torch.randn(8, 32)).square().mean().backward()
print("done")
"""


@pytest.mark.proof
def test_a_script_that_exits_during_the_shutdown_of_gloo_ends() -> None:
    script = write_script(LEAVES)
    # Run by Python itself, two of five times it hung.
    for turn in range(2):
        done = run_cpuft("launch", "--np", "2", "--run-dir", f"run{turn}", "--", script, seconds=60)
        assert (done.returncode, done.stdout.splitlines()[0]) == (0, "done"), done.stderr


@pytest.mark.proof
@needs_glue
def test_the_hugging_face_trainer_runs_under_launch() -> None:
    from cpuft.train.model import find_model

    words = ("--data", str(GLUE / "MRPC"), "--model", find_model("minilm"), "--max-steps", "2", "--bf16", "--dynamic")
    done = run_cpuft("launch", "--np", "2", "--run-dir", "run", "--", str(PEERS / "hf_trainer.py"), *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-2])["precision"] == "bf16"


RAISE = """
import os, sys, time
if os.environ["RANK"] == "1":
    raise ValueError("the data is odd")
time.sleep(60)
"""
EXIT = """
import os, sys, time
sys.exit(3 * int(os.environ["RANK"]))
"""
KILLED = """
import os, signal, time
os.environ["RANK"] == "1" and os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "text, code, words",
    [
        (RAISE, 1, "exit code 1"),
        (EXIT, 3, "exit code 3"),
        (KILLED, 139, "killed by signal 11"),
        (KILLED.replace("SIGSEGV", "SIGKILL"), 137, "killed by signal 9"),
    ],
)
def test_the_exit_code_and_last_lines_of_the_worst_rank(text: str, code: int, words: str) -> None:
    done = run_cpuft("launch", "--np", "2", "--independent", "--run-dir", "run", "--", write_script(text), seconds=55)
    assert done.returncode == code
    lines = done.stderr.rstrip().splitlines()
    assert f"cpuft: rank 1 on localhost failed ({words}). Last lines of rank 1:" in lines
    assert lines[-1] == "cpuft: rank 1 on localhost failed"
    assert text is not RAISE or lines[-2] == "ValueError: the data is odd"


MEMORY = """
import os, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
b"x" * (1 << 28)
"""
GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 64 MB."""
    group = GROUPS / f"cpuft-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(64 << 20))
    yield group
    end = time.monotonic() + 20
    while (group / "cgroup.procs").read_text() and time.monotonic() < end:
        time.sleep(0.1)
    group.rmdir()


@pytest.mark.skipif(not os.access(GROUPS, os.W_OK), reason="no control groups of memory (v1) that may be made")
def test_a_rank_that_runs_out_of_memory_is_named_with_the_cause(small_group: Path) -> None:
    done = run_cpuft("launch", "--run-dir", "run", "--", write_script(MEMORY), str(small_group), seconds=60)
    assert done.returncode == 137
    assert done.stderr.rstrip().splitlines()[-3:] == [
        "cpuft: rank 0 on localhost failed (killed by the kernel because memory ran out). Lower --batch-size or "
        "--max-length, add --gradient-checkpointing, or start fewer ranks on this host. Last lines of rank 0:",
        "cpuft: the kernel killed this rank because memory ran out",
        "cpuft: rank 0 on localhost failed",
    ]


DIFFERENT = """
import os, torch
from cpuft.rank.world import parse_world
from cpuft.train.ranks import check_ranks, join_process_group, prove_equal_parameters
from cpuft.errors import CpuftError
model, world = torch.nn.Linear(2, 2), parse_world(os.environ)
world.rank == 1 and os.sched_setaffinity(0, {0, 1})
with join_process_group(world, "gloo", 30):
    torch.nn.init.constant_(model.weight, 1.0), torch.nn.init.constant_(model.bias, float(world.rank == 1))
    try:
        prove_equal_parameters(model, "now")
    except CpuftError as error:
        print(error, flush=True)
    check_ranks(world)
"""


def test_a_rank_with_other_parameters_is_named_and_one_on_other_cores_than_planned_stops_the_run() -> None:
    done = run_cpuft("launch", "--np", "2", "--run-dir", "run", "--", write_script(DIFFERENT))
    assert done.stdout.startswith("now, the parameters of rank 1 on "), done.stderr
    assert " differ from those of the other ranks: bias. Either the hosts differ " in done.stdout
    assert done.returncode == 1
    assert "runs on hardware threads [0, 1], planned [1]" in done.stderr
    assert "CpuftError: rank 1 on " in done.stderr


TRAINS = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
how, rank = sys.argv[1], int(__import__("os").environ["RANK"])
if how == "spawn":
    mp.spawn(print, nprocs=2)
if how == "uneven-ccl":
    import cpuft.comm
dist.init_process_group("ccl" if how == "uneven-ccl" else "gloo")
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20 if rank == 0 or "uneven" not in how else 5):
    (model.module if how == "inside" else model)(torch.randn(4, 8)).square().mean().backward()
    optimizer.step(), optimizer.zero_grad()
    if how == "inside":
        dist.all_reduce(torch.ones(1))  # as to print a mean of the losses
"""
ENDED = (
    "cpuft: the script of rank 1 on localhost ended normally after 5 optimizer steps, and rank 0 on localhost waited "
    "for it, in its step 6: give all ranks the same number of batches, as DistributedSampler does, or train inside the "
    "model's join()"
)


@pytest.mark.parametrize(
    "how, code, place, line",
    [
        (
            "inside",
            2,
            -2,
            "cpuft: error: the script was stopped before optimizer step 2 because each rank trains a copy",
        ),
        ("spawn", 2, -2, "cpuft: error: the script starts processes of its own. Next: cpuft launch has started one"),
        ("uneven", 1, -1, ENDED),
        ("uneven-ccl", 75, -1, ENDED),
    ],
)
def test_scripts_whose_ranks_do_not_train_together_are_told_why(how: str, code: int, place: int, line: str) -> None:
    done = run_cpuft("launch", "--np", "2", "--run-dir", "run", "--", write_script(TRAINS), how, seconds=120)
    assert done.returncode == code, done.stderr
    assert (done.stderr.rstrip().splitlines() or [""])[place].startswith(line), done.stderr
