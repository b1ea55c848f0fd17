"""Hosts with disks of their own: the printed plan is what runs, and nothing stays on the hosts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from cpuft.record import read_record
from cpuft.train.embedder import Embedder
from tests.conftest import wait_until
from tests.launch import hanging
from tests.provision.simulated import Simulated, needs_root, own_root, simulate
from tests.train.tiny import save_tiny

pytestmark = needs_root
TRAINING = ("--np", "2", "--task", "demo", "--max-train-samples", "64", "--max-steps", "2", "--precision", "fp32")
TEXTS = ("--task", "text", "--train-file", "book.txt", "--max-length", "32")
QUIET = ("--dropout", "0", "--backend", "gloo", "--no-save-model", "--no-check", "--no-fast-path")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    with (
        own_root(tmp_path_factory.mktemp("apart")) as image,
        simulate(image.parent, "--nodes", "3", "--image", str(image)) as made,
    ):
        yield made


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def files_of(cluster: Simulated, part: str = "") -> list[str]:
    """All files that a host wrote, and files beside the cluster's on this machine."""
    nodes = cluster.folder / "state" / cluster.name / "nodes"
    written = [str(path) for node in "123" for path in (nodes / node / "upper" / part).rglob("*")]
    return sorted([*written, *map(str, cluster.folder.glob("*"))])


@pytest.mark.proof
def test_the_printed_plan_is_the_plan_that_runs(cluster: Simulated) -> None:
    launch = ("launch", "--cluster", cluster.name, *TRAINING, *QUIET)
    done = cluster.cpuft(*launch, "--run-dir", "launched")
    assert done.returncode == 0, done.stderr
    before = files_of(cluster)
    printed = cluster.cpuft(*launch, "--run-dir", "by-hand", "--dry-run")
    assert files_of(cluster) == before
    script = subprocess.run(["bash"], input=printed.stdout, cwd=cluster.folder, capture_output=True, text=True)
    assert script.returncode == 0, script.stderr
    assert losses(cluster.folder / "by-hand") == losses(cluster.folder / "launched") != []
    new = set(files_of(cluster, "var/tmp")) - set(before)
    assert new == {str(cluster.folder / "by-hand")}
    # But for its own name and places it is the one that ran.
    own, other = (
        re.sub(r"/[0-9a-f]{12}|MASTER_PORT [0-9]+|launched|by-hand", "", text).splitlines()
        for text in ((cluster.folder / "launched" / "plan.sh").read_text(), printed.stdout)
    )
    assert own[-20:] == other[-20:]


@pytest.mark.proof
def test_ranks_that_hang_are_diagnosed_on_their_hosts(cluster: Simulated) -> None:
    """During the hang by the user, and at the timeout by the supervisor on the head host."""
    script = cluster.folder / "hanging.py"
    shutil.copy(hanging.__file__, script)
    words = ["launch", "--cluster", cluster.name, "--np", "2", "--no-check", "--run-dir", "hung", "--", "hanging.py"]
    command = [sys.executable, "-m", "cpuft", *words, "gloo", "loop", "1", "30"]
    environ = {**os.environ, "CPUFT_STATE": str(cluster.folder / "state")}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=cluster.folder, env=environ, stderr=pipe, text=True) as launch:
        limit, verdict = time.monotonic() + 120, ""
        while "in spin" not in verdict and launch.poll() is None and time.monotonic() < limit:
            time.sleep(0.5)
            asked = cluster.cpuft("stacks", "hung")
            verdict = next((line for line in asked.stdout.splitlines() if line.startswith("cpuft: ")), "")
        assert launch.stderr
        lines = launch.stderr.read().splitlines()
    script.unlink()  # what lies beside a script travels with it
    assert (launch.returncode, asked.returncode) == (75, 0), asked.stderr
    who = rf"cpuft: rank 1 on {re.escape(cluster.hosts[1].name)} blocks the others"
    where = r"it is at hanging\.py:\d+ in spin, running.*"
    # The first time that it could be seen, rank 0 may not have been where it is at the end.
    assert re.fullmatch(rf"{who} \(rank 0 waits in .*\): {where}", verdict), lines
    assert re.fullmatch(rf"{who} \(rank 0 waits in all_reduce #6 of group 1\): {where}", lines[-1]), lines
    for rank in ("0", "1"):
        assert "in main\n" in (cluster.folder / "hung" / "logs" / f"rank-{rank}.stack").read_text()


def test_a_large_file_leaves_this_machine_once(cluster: Simulated) -> None:
    """The first host sends it to the two others."""
    data = cluster.folder / "large.bin"
    data.write_bytes(os.urandom(24_000_000))
    script = cluster.folder / "hashes.py"
    script.write_text("import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())\n")
    counter = Path(f"/sys/class/net/cpuft-{cluster.name}/statistics/tx_bytes")
    before = int(counter.read_text())
    words = ("launch", "--cluster", cluster.name, "--np", "3", "--independent", "--no-check", "--run-dir", "hashed")
    done = cluster.cpuft(*words, "--", "hashes.py", "large.bin")
    sent = int(counter.read_text()) - before
    for path in (data, script):
        path.unlink()
    assert done.returncode == 0, done.stderr
    assert f"send large.bin to {cluster.hosts[2].name} (24.0 MB)" in done.stderr
    assert 24_000_000 < sent < 30_000_000
    logs = {path.read_text() for path in (cluster.folder / "hashed" / "logs").glob("rank-*.out")}
    assert len(list((cluster.folder / "hashed" / "logs").glob("rank-*.out"))) == 3
    assert len(logs) == 1
    shutil.rmtree(cluster.folder / "hashed")


def test_a_script_and_its_data_are_sent_once(cluster: Simulated) -> None:
    (cluster.folder / "rows.csv").write_text("a 0,b\n")
    script = cluster.folder / "reads.py"
    script.write_text(
        "import os, pathlib, socket, sys\n"
        "text = pathlib.Path(sys.argv[1]).read_text()\n"
        "if os.environ['RANK'] == '0':\n"
        "    pathlib.Path(os.environ['CPUFT_RUN_DIR'], 'said').write_text(text + socket.gethostname())\n"
    )
    words = ("launch", "--cluster", cluster.name, "--np", "2", "--independent", "--no-check")
    first = cluster.cpuft(*words, "--run-dir", "first", "--", "reads.py", "rows.csv")
    assert first.returncode == 0, first.stderr
    assert "send reads.py to" in first.stderr
    assert (cluster.folder / "first" / "said").read_text() == f"a 0,b\n{cluster.name}-1"
    second = cluster.cpuft(*words, "--run-dir", "second", "--", "reads.py", "rows.csv")
    assert "send" not in second.stderr
    assert second.returncode == 0, second.stderr


def write_texts(cluster: Simulated, count: int) -> tuple[str, ...]:
    """Write a tiny embedding model and texts, and return options of `cpuft predict` on two hosts."""
    if not (cluster.folder / "tiny").exists():
        save_tiny(cluster.folder / "tiny")
    (cluster.folder / "texts.csv").write_text("text\n" + "".join(f"a cat {number}\n" for number in range(count)))
    return ("predict", "--model", "tiny", "--file", "texts.csv", "--precision", "fp32", "--output", "vectors.npy")


def test_embeddings_of_two_hosts_come_back(cluster: Simulated) -> None:
    """Only the head host gets the texts. But for the inputs, hosts keep nothing."""
    words = write_texts(cluster, 2500)
    done = cluster.cpuft(*words, "--cluster", cluster.name, "--np", "2", "--no-check", "--run-dir", "embedded")
    assert (done.returncode, done.stdout) == (0, "embeddings: vectors.npy\n"), done.stderr
    found = np.load(cluster.folder / "vectors.npy")
    copy = shutil.copytree(cluster.folder / "tiny", "tiny")  # this process keeps its file open
    alone = Embedder(str(copy), "fp32").embed([f"a cat {number}" for number in range(2500)])
    assert found.shape == (2500, 32)
    assert np.abs(found - alone).max() < 1e-6
    (cluster.folder / "vectors.npy").unlink()
    nodes = cluster.folder / "state" / cluster.name / "nodes"
    sent = {index: {path.name for path in (nodes / index / "upper/var/tmp").rglob("*.*")} for index in "12"}
    assert ("texts.csv" in sent["1"], "texts.csv" in sent["2"]) == (True, False)
    assert ("config.json" in sent["1"], "config.json" in sent["2"]) == (True, True)
    assert not [path for path in files_of(cluster, "var/tmp") if "vectors" in path or path.endswith("embeddings.npy")]
    assert sorted(path.name for path in (cluster.folder / "embedded").iterdir()) == ["logs", "plan.sh", "state.json"]


@pytest.mark.proof
@pytest.mark.parametrize("index", [1, 2])
def test_a_lost_host_ends_embeddings_with_its_name(index: int, cluster: Simulated) -> None:
    words = [*write_texts(cluster, 400_000), "--batch-size", "1", "--cluster", cluster.name, "--np", "2", "--no-check"]
    command = [sys.executable, "-m", "cpuft", *words, "--run-dir", f"lost-{index}"]
    environ = {**os.environ, "CPUFT_STATE": str(cluster.folder / "state")}
    disk = cluster.folder / "state" / cluster.name / "nodes" / "1" / "upper" / "var" / "tmp"
    with subprocess.Popen(command, cwd=cluster.folder, env=environ, stderr=subprocess.PIPE, text=True) as process:
        limit = time.monotonic() + 60
        while not list(disk.glob(f"cpuft-*/*/lost-{index}/*.new")) and process.poll() is None:
            assert time.monotonic() < limit, "the ranks did not begin to write"
            time.sleep(0.1)
        switch_off(cluster, index)
        said = process.communicate(timeout=150)[1]
    repair(cluster)
    name = cluster.hosts[index - 1].name
    assert process.returncode == 3 - index, said
    assert f"host {name} does not answer" in said, said
    assert not (cluster.folder / "vectors.npy").exists()
    assert not list(cluster.folder.glob("lost-*/*.new"))
    for host in (1, 2):
        assert "embed_on_hosts" not in cluster.on(host, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")


def checkpoints_of(cluster: Simulated, index: int) -> list[str]:
    disk = cluster.folder / "state" / cluster.name / "nodes" / str(index) / "upper"
    return sorted(path.name for path in disk.glob("var/tmp/cpuft-*/*/*/checkpoints/*") if path.suffix[1:].isdecimal())


def wait_for_checkpoint(cluster: Simulated, index: int) -> None:
    wait_until(lambda: checkpoints_of(cluster, index))


def switch_off(cluster: Simulated, index: int) -> None:
    """At once, unlike `provision local kill`."""
    node = cluster.folder / "state" / cluster.name / "nodes" / str(index)
    os.kill(int((node / "pid").read_text()), signal.SIGKILL)


def repair(cluster: Simulated) -> None:
    image = str(cluster.folder / "image")
    done = cluster.cpuft("provision", "local", "--name", cluster.name, "--nodes", "3", "--image", image)
    assert done.returncode == 0, done.stderr


def break_off(cluster: Simulated, run: str) -> tuple[int, list[str]]:
    """Start a training on all hosts, switch off the head host, and return exit code and output of the launch."""
    words = ["--np", "3", *TRAINING[2:], *QUIET, "--max-steps", "20", "--batch-size", "4", "--checkpoint-every", "0.1"]
    words += ["--max-restarts", "0"]
    command = [sys.executable, "-m", "cpuft", "launch", "--cluster", cluster.name, *words, "--run-dir", run]
    environ = {**os.environ, "CPUFT_STATE": str(cluster.folder / "state")}
    with subprocess.Popen(command, cwd=cluster.folder, env=environ, stderr=subprocess.PIPE, text=True) as process:
        wait_for_checkpoint(cluster, 2)
        switch_off(cluster, 1)
        said = process.communicate(timeout=150)[1]
    return process.returncode, said.splitlines()


@pytest.mark.proof
def test_a_run_is_resumed_without_its_head_host(cluster: Simulated) -> None:
    """It continues from the checkpoint on the second host, and its record includes the updates before the loss."""
    before = files_of(cluster, "var/tmp")
    run = cluster.folder / "run"
    code, lines = break_off(cluster, "run")
    assert code == 2, lines
    kept = checkpoints_of(cluster, 2)
    update = int(kept[-1].partition(".")[0])
    names = [host.name for host in cluster.hosts]
    saved = f"cpuft: checkpoints up to update {update} are saved on {names[1]}: "
    assert lines[-2] == f"{saved}continue with cpuft launch --resume {run}"
    assert f"the run's record is in /var/tmp/cpuft-{os.getuid()}/" in lines[-1]
    words = ("--np", "2", "--no-check", "--checkpoint-every", "0")
    # In another container, where the host name is another one, and on the same cluster without naming it.
    resume = shlex.join([sys.executable, "-m", "cpuft", "launch", "--resume", "run", *words])
    environ = {**os.environ, "CPUFT_STATE": str(cluster.folder / "state")}
    container = ["unshare", "--uts", "sh", "-c", f"hostname next; exec {resume}"]
    done = subprocess.run(container, cwd=cluster.folder, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    again = f"cpuft: the run was started with --cluster {cluster.name}, which is used again"
    assert done.stderr.splitlines()[0] == again
    assert f"{names[0]}" in done.stderr.splitlines()[1]
    record = read_record(str(run))
    assert [step.step for step in record.steps] == list(range(1, 21))
    (resumed,) = record.resumptions
    assert (resumed.step, [rank.host for rank in resumed.ranks]) == (update, [f"{cluster.name}-{i}" for i in (2, 3)])
    assert (record.header.world_size, record.header.global_batch) == (3, 12)
    repair(cluster)
    left = set(files_of(cluster, "var/tmp")) - set(before)
    assert [path for path in left if "/nodes/1/" not in path and not path.endswith("/cpuft-0")] == [str(run)]


def until(start: str, stream: IO[str]) -> list[str]:
    """Read lines up to the first one with this beginning, and return those before it."""
    return list(takewhile(lambda line: not line.startswith(start), stream))


def start_lasting(cluster: Simulated, run: str, *words: str) -> subprocess.Popen[str]:
    """A launch that restarts by itself."""
    where = ["--cluster", cluster.name, "--batch-size", "4", "--checkpoint-every", "0.1", "--run-dir", run]
    command = [sys.executable, "-m", "cpuft", "launch", *where, *TRAINING[2:], *QUIET, *words]
    environ = {**os.environ, "CPUFT_STATE": str(cluster.folder / "state")}
    return subprocess.Popen(command, cwd=cluster.folder, env=environ, stderr=subprocess.PIPE, text=True)


@pytest.mark.proof
@pytest.mark.parametrize("job", [(), TEXTS], ids=["demo", "text"])
def test_a_run_that_loses_its_head_host_is_restarted_and_finishes(job: tuple[str, ...], cluster: Simulated) -> None:
    """It restarts by itself. The number of updates is known although the record is lost."""
    steps, run = 16, f"bereft-{len(job)}"
    (cluster.folder / "book.txt").write_text("a line of a book that nobody wrote, and few will read\n" * 400)
    with start_lasting(cluster, run, "--np", "2", "--max-steps", str(steps), *job) as process:
        wait_for_checkpoint(cluster, 2)
        switch_off(cluster, 1)
        assert process.stderr is not None
        before = until("resumed after update ", process.stderr)
        after = list(process.stderr)
        assert process.wait(10) == 0, "".join([*before, *after])
    repair(cluster)
    shown = [int(line.split("/")[0].removeprefix("step ")) for line in before if line.startswith("step ")]
    record = read_record(str(cluster.folder / run))
    (resumed,) = record.resumptions
    assert resumed.restart_reason == f"host {cluster.hosts[0].name} was lost"
    assert [rank.host for rank in resumed.ranks] == [f"{cluster.name}-{index}" for index in (2, 3)]
    assert resumed.step + resumed.repeated >= max(shown, default=0)
    assert [one.step for one in record.steps] == list(range(1, steps + 1))
    assert [line for line in before + after if "are saved on" in line] == []


def find_processes(run: str) -> list[str]:
    """Processes of a run on all hosts."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"/{run}\0" in (path / "environ").read_text(errors="replace").partition("CPUFT_RUN_DIR=")[2]:
                found.append((path / "cmdline").read_text(errors="replace").replace("\0", " "))
    return found


@pytest.mark.proof
def test_a_head_host_that_is_cut_from_the_launcher_only_does_not_go_on(cluster: Simulated) -> None:
    """Its ranks could go on with the others, which answer the launcher."""
    with start_lasting(cluster, "parted", "--np", "3", "--max-steps", "60") as process:
        wait_for_checkpoint(cluster, 2)
        cluster.on(1, "set -- $SSH_CONNECTION; (sleep 1; ip route add blackhole $1) >/dev/null 2>&1 </dev/null &")
        assert process.stderr is not None
        before = until("resumed after update ", process.stderr)
        after = list(process.stderr)
        assert process.wait(10) == 0, "".join([*before, *after])
    record = read_record(str(cluster.folder / "parted"))
    assert [one.step for one in record.steps] == list(range(1, 61))
    (resumed,) = record.resumptions
    assert [rank.host for rank in resumed.ranks] == [f"{cluster.name}-{index}" for index in (2, 3)]
    wait_until(lambda: not find_processes("parted"), pause=0.5)
    repair(cluster)


@pytest.mark.proof
def test_a_run_that_loses_a_worker_and_then_its_head_host_finishes(cluster: Simulated) -> None:
    """It restarts by itself with the same examples in every update. The worker is available again by then."""
    names = [host.name for host in cluster.hosts]
    with start_lasting(cluster, "lasting", "--np", "3", "--max-steps", "40") as process:
        assert process.stderr is not None
        wait_for_checkpoint(cluster, 2)
        switch_off(cluster, 3)
        said = until("cpuft: restart 1 of 3: ", process.stderr)
        named = f"cpuft: host {names[2]} does not answer, so rank 2 was lost: check the host with cpuft doctor\n"
        assert named in said
        repair(cluster)
        said += until("resumed after update ", process.stderr)
        switch_off(cluster, 1)
        said += process.stderr
        assert process.wait(10) == 0, "".join(said)
    record = read_record(str(cluster.folder / "lasting"))
    last = record.resumptions[-1]
    assert last.restart_reason == f"host {names[0]} was lost"
    taken_back = [f"{cluster.name}-{index}" for index in (2, 3)]
    assert ([rank.host for rank in last.ranks], last.lost_seconds > 0) == (taken_back, True)
    repair(cluster)
    job = [*TRAINING[2:], *QUIET, "--max-steps", "40", "--batch-size", "12"]
    whole = cluster.cpuft("launch", "--np", "1", "--run-dir", "whole", *job)
    assert whole.returncode == 0, whole.stderr
    undisturbed = read_record(str(cluster.folder / "whole"))
    assert [(one.step, one.tokens) for one in record.steps] == [(one.step, one.tokens) for one in undisturbed.steps]
    assert losses(cluster.folder / "lasting") == pytest.approx(losses(cluster.folder / "whole"), abs=1e-4)


@pytest.mark.proof
def test_a_host_with_an_interruption_notice_is_left_in_time(cluster: Simulated) -> None:
    """The run is saved and continues on the other hosts. Here the leaving host is the head host."""
    job = [*TRAINING[2:], *QUIET, "--max-steps", "16", "--checkpoint-every", "0", "--batch-size", "4"]
    cluster.on(1, "touch /notice")
    where = ("--cluster", cluster.name, "--np", "2", "--run-dir", "leaving", "--interruption-notice", "/notice")
    done = cluster.cpuft("launch", *where, *job)
    cluster.on(1, "rm /notice")
    assert done.returncode == 0, done.stderr
    record = read_record(str(cluster.folder / "leaving"))
    (resumed,) = record.resumptions
    assert (resumed.restart_reason, resumed.repeated) == (
        f"host {cluster.hosts[0].name} received an interruption notice",
        0,
    )
    assert [rank.host for rank in resumed.ranks] == [f"{cluster.name}-2", f"{cluster.name}-3"]
    assert [one.step for one in record.steps] == list(range(1, 17))
    others = ", ".join(host.name for host in cluster.hosts[1:])
    assert f"cpuft: restart 1 of 3: {resumed.restart_reason}; 2 ranks on {others} continue after update " in done.stderr
