"""The command line: quick to answer, and one clear line for bad input."""
# ruff: noqa: E501 (a message stands on one line, as a terminal shows it)

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cpuft import tasks
from cpuft.cli import main
from cpuft.tasks import TASKS
from tests.conftest import call_cpuft, run_cpuft


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = "import sys; sys.argv = ['cpuft', '--help']\nimport atexit\nfrom cpuft.cli import main\n"
    code += "atexit.register(lambda: print(*sorted({m.split('.')[0] for m in sys.modules})))\nmain()"
    seconds = []
    for _ in range(3):
        start = os.times()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        end = os.times()
        seconds.append(end.children_user + end.children_system - start.children_user - start.children_system)
    loaded = done.stdout.splitlines()[-1].split()
    assert not {"torch", "numpy", "transformers", "paramiko", "yaml", "rich", "boto3", "botocore"} & set(loaded)
    # 0.13 where nothing else runs; beside others half as much again.
    assert min(seconds) < 0.3


def test_a_user_without_a_name_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises((KeyError, OSError)):
        getpass.getuser()
    with pytest.raises(SystemExit):
        main(["--version"])
    assert getpass.getuser() == "cpuft"


def test_tasks_of_the_option_are_those_of_the_trainer() -> None:
    assert set(TASKS) == set(tasks.TASKS)


@pytest.mark.parametrize(
    "words, message",
    [
        (["lanch"], "there is no command cpuft lanch: did you mean launch? (see cpuft --help)"),
        (["launch", "--tsk", "x"], "there is no option --tsk: did you mean --task? (see cpuft launch --help)"),
        (["launch", "--task", "mprc"], "'mprc' is not a value of --task: did you mean mrpc? (see cpuft launch --help)"),
        (["launch", "--np", "0"], "--np '0' is not valid: give a whole number of 1 or more (see cpuft launch --help)"),
        (["launch", "--master-port", "65536"], "--master-port '65536' is not valid: give a whole number from 0 to 65535"),
        (["launch", "--np", "999"], "999 ranks on localhost, which has"),
        (["launch", "--hostfile", "none"], "there is no file none, which --hostfile names"),
        (["launch", "--hostfile", "bad"], "bad, line 2: 'slot=4' is not understood: write slots=N, user=NAME or"),
        (["launch", "--hostfile", "same"], "localhost and 127.0.0.1 are the same host: keep one line"),
        (["launch", "--np", "2", "--hostfile", "away"], "host 127.0.0.9 cannot be used over ssh"),
        (["launch", "--mpirun", "/none"], "there is no mpirun at /none"),
        (["launch", "--mpirun", "/bin/true"], "/bin/true is not an mpirun that cpuft knows"),
        (["launch", "--run-dir", "."], "exists already, and a run needs a new folder: give --run-dir the name"),
        (["launch", "--config", "none.yaml"], "there is no file none.yaml, which --config names"),
        (["launch", "--config", "bad.yaml"], "--config bad.yaml: there is no option 'tsk': did you mean task?"),
        (["launch", "--iface", "eth77"], "has no interface eth77 with an address"),
        (["launch", "--config", "half.yaml"], "--config half.yaml: max-steps '3.5' is not valid: give a whole"),
        (["launch", "--train-file", "x.csv"], "--train-file has no effect with --task demo: leave"),
        (["launch", "--task", "mrpc", "--quoting", "none"], "--quoting has no effect with --task mrpc: leave it out"),
        (["launch", "--task", "chat", "--encoding", "latin-1"], "--encoding has no effect with --task chat: leave it"),
        (["launch", "--task", "pairs", "--skip-unlabelled"], "--skip-unlabelled has no effect with --task pairs: leave"),
        (["launch", "--whole-word-mask"], "--whole-word-mask has no effect with --task demo: leave it out, or give"),
        (
            ["launch", "--task", "text", "--model", "minilm", "--from-config", "bert-base"],
            "--model and --from-config exclude each other: leave out one of them (see cpuft launch --help)",
        ),
        (["launch", "--mlm-probability", "0.95"], "--mlm-probability '0.95' is not valid: give a number from 0.01 to 0.9"),
        (["launch", "--data-dir", "glue"], "--data-dir has no effect with --task demo: leave"),
        (["compare", "--validation-file", "x.csv"], "--validation-file has no effect with --task demo: leave"),
        (["launch", "--shard", "optimizer", "--sync-every", "4"], "--shard excludes --sync-every, because each rank updates only"),
        (["compare", "--shard", "optimizer", "--grad-compression", "int8"], "--shard supports only none, bf16"),
        (["launch", "--task", "mrpc", "--", "same"], "--task is for cpuft's own training, not for a script: leave"),
        (["bench", "comm", "--np", "2", "--sizes", "7"], "--sizes: 7 bytes are no whole float32 elements"),
        (["bench", "comm", "--np", "2", "--backends", "nccl"], "'nccl' is not a value of --backends: did you mean ccl?"),
        (["bench", "comm"], "bench comm measures the links between ranks: start two or more, e.g. --np 2"),
        (["launch", "--", "none.py"], "there is no script none.py in the folder "),
        (["compare", "--np", "1,x"], "--np 1,x: 'x' is not a whole number from 1 to 1000000: give numbers"),
        (["compare", "--np", "2,1,2"], "--np 2,1,2: the number 2 is there twice: give numbers with commas"),
        (["compare", "--np", "9" * 5000], "999' is not a whole number from 1 to 1000000: give numbers"),
        (["launch", "--epochs", "nan"], "--epochs 'nan' is not valid: give a number of 0 or more (see cpuft launch --help)"),
        (["launch", "--learning-rate", "inf"], "--learning-rate 'inf' is not valid: give a number of 0 or more (see cpuft launch --help)"),
        (["report", "none"], "there is no folder none: give the folder of an earlier run"),
        (["estimate", "none", "--bandwidth", "1gbit"], "there is no folder none: give the folder"),
        (["stacks", "none"], "there is no folder "),
        (["stacks", "."], "no run is active in the folder .: the run has ended, or no cpuft launch of"),
        (["estimate", "none"], "the speed of the network between the hosts is not known: give --bandwidth,"),
        (["estimate", "--bandwidth", "fast"], "--bandwidth 'fast' is not a bit rate: write for example 1gbit"),
        (["estimate", "--hosts", "1,x"], "--hosts 1,x: 'x' is not a whole number from 1 to 1024: give numbers"),
        (["estimate", "--instance", "c7i.huge"], "--instance c7i.huge is not a known type of instance: did you"),
        (["estimate", "none", "--task", "mrpc"], "--task is for the short training that is done without RUN: leave out this option, or RUN"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line_and_starts_nothing(
    words: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = {
        "half.yaml": "max-steps: 3.5\n",
        "bad": "localhost\nb slot=4\n",
        "same": "localhost\n127.0.0.1\n",
        "away": "localhost\n127.0.0.9 port=9\n",
        "bad.yaml": "tsk: mrpc\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    code, said, warned = call_cpuft(capfd, *words)
    assert (code, said, warned.count("\n")) == (2, "", 1)
    assert message in warned
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("task: rte\nlearning-rate: 1e-4\nnp: 2\n")
    done = run_cpuft("launch", "--config", "options.yaml", "--task", "sst2", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("--task=sst2", "--learning-rate=0.0001", "CPUFT_WORLD_SIZE 2"))


def test_ranks_to_compare_may_stand_in_the_file(tmp_path: Path) -> None:
    """With strong scaling, all ranks together have the same batch."""
    (tmp_path / "options.yaml").write_text("np: [1, 2]\nscaling: strong\nbatch-size: 16\n")
    done = run_cpuft("compare", "--config", "options.yaml", "--run-dir", "run", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert all(f"run/np-{ranks}/data.npz" in done.stdout for ranks in (1, 2))
    assert set(re.findall(r"--batch-size=(\d+) ", done.stdout)) == {"16", "8"}


def test_bf16_without_hardware() -> None:
    limit = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = run_cpuft("launch", "--precision", "bf16", "--dry-run", settings=limit)
    assert done.returncode == 2
    assert "use --precision fp32, or force it with --emulate-bf16" in done.stderr
    assert run_cpuft("launch", "--precision", "bf16", "--emulate-bf16", "--dry-run", settings=limit).returncode == 0


def test_settings_can_be_evaluated() -> None:
    script = f'eval "$({sys.executable} -m cpuft env)"; echo "$MASTER_ADDR $CCL_ATL_TRANSPORT $OMP_NUM_THREADS"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    address, transport, threads = done.stdout.split()
    assert (address, transport) == ("127.0.0.1", "ofi")
    assert int(threads) >= 1


def test_settings_leave_out_what_no_shell_can_set() -> None:
    done = run_cpuft("env", settings={"OMP_X;id #": "1", "HF_API_KEY": "hunter2"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "OMP_X" not in done.stdout
    assert "hunter2" not in done.stdout


def test_a_launch_after_env_in_the_same_shell_chooses_for_itself() -> None:
    cpuft = f"{sys.executable} -m cpuft"
    script = f'eval "$({cpuft} env)"; export FI_PROVIDER=efa; {cpuft} launch --np 2 --dry-run'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    (kept,) = [line for line in done.stdout.splitlines() if "kept as you set" in line and ": " in line]
    assert kept == "# variables kept as you set them: FI_PROVIDER"


TOO_LONG = ("a" * 300, "/" + "a/" * 3000 + "b")


@pytest.mark.parametrize("path", TOO_LONG, ids=["a name", "a path"])
@pytest.mark.parametrize(
    "words",
    [
        ("launch", "--dry-run", "--run-dir"),
        ("launch", "--dry-run", "--"),
        ("compare", "--dry-run", "--run-dir"),
        ("bench", "comm", "--dry-run", "--np", "2", "--run-dir"),
        ("report",),
        ("provision", "image", "--dry-run", "--recipe", "recipe.yaml", "--output", "o", "--wheels"),
    ],
    ids=" ".join,
)
def test_a_path_too_long_for_the_file_system(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], path: str
) -> None:
    shutil.copy(Path(__file__).parents[2] / "ami" / "recipe.yaml", "recipe.yaml")
    with pytest.raises(SystemExit) as ended:
        main((*words, path))
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    assert said.endswith("is longer than the file system takes: give a shorter one\n")


@pytest.mark.parametrize("option", ["--model", "--data-dir"])
def test_a_path_too_long_for_what_is_trained(option: str) -> None:
    words = (sys.executable, "-m", "cpuft.train.data.prepare", "out", "--task=mrpc", f"{option}={TOO_LONG[0]}")
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("is longer than the file system takes: give a shorter one")


@pytest.mark.parametrize("words", [("report", "run"), ("launch", "--dry-run"), ("stacks", "run"), ("data", "show")])
def test_a_working_folder_that_was_deleted_is_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    script = 'rmdir "$PWD"; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-m", "cpuft", *words],
        cwd=tmp_path / "gone",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = "cpuft: error: the working folder does not exist any more: change to another one\n"
    assert (done.returncode, done.stderr) == (2, said)
