"""A head with Windows: Python for Windows makes clusters of simulated servers and trains on simulated hosts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuft.hosts.registry import FILE_NAME
from cpuft.record import read_record
from tests.conftest import wait_until
from tests.provision.simulated import Simulated, needs_root, simulate, simulate_servers
from tests.system.windows import USER, Windows, open_windows
from tests.train.tiny import save_tiny, write_rows

pytestmark = [pytest.mark.proof, needs_root]
TRAINING = (
    *("--cluster", "away", "--np", "2", "--task", "files", "--train-file", "data/rows.jsonl", "--model", "data/tiny"),
    *("--max-length", "32", "--no-check", "--seed", "7"),
)


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Windows]:
    with open_windows(tmp_path_factory.mktemp("windows")) as made:
        save_tiny(made.home / "data/tiny")
        write_rows(made.home / "data/rows.jsonl", "score", 600, 1)
        yield made


@pytest.fixture
def hosts(windows: Windows, tmp_path: Path) -> Iterator[Simulated]:
    """Two hosts, known on Windows as the cluster `away`, which have no file of this machine in their work folder."""
    with simulate(tmp_path, "--nodes", "2") as made:
        for index in (1, 2):
            made.on(index, "mount -t tmpfs tmpfs /var/tmp")
        there, here = tmp_path / "state" / made.name, windows.home / ".local/state/cpuft/clusters/away"
        here.mkdir(parents=True)
        for name in ("known_hosts", "id_ed25519"):
            shutil.copy(there / name, here)
        inside = f"C:/users/{USER}/.local/state/cpuft/clusters/away"
        config = re.sub(rf"{there}(/\w+)", rf'"{inside}\1"', (there / "ssh_config").read_text())
        (here / "ssh_config").write_text(config)
        (windows.home / "hostfiles").mkdir(exist_ok=True)
        text = "".join(f"{host.name}\n" for host in made.hosts)
        (windows.home / "hostfiles/away").write_text(f"# Cluster away, made by cpuft provision.\n{text}")
        entry = json.loads((there / FILE_NAME).read_text()) | {"name": "away", "kind": "hosts", "options": {}}
        entry |= {"hostfile": f"C:/users/{USER}/hostfiles/away", "ssh_config": f"{inside}/ssh_config"}
        entry |= {"shares_files": False, "ssh_config_there": str(there / "ssh_config")}
        (here / FILE_NAME).write_text(json.dumps(entry))
        yield made
        shutil.rmtree(here)


def count_ranks(hosts: Simulated) -> int:
    return int(hosts.on(1, "pgrep -fc '[c]puft.rank' || true"))


STARTS = """
import os, sys, time
from cpuft.execute import start_process
start_process([sys.executable, "-c", "import time; time.sleep(%d)" % (7000 + 777)], os.environ)
print("started", flush=True)
time.sleep(60)
"""


def test_a_process_ends_with_the_one_that_started_it(windows: Windows) -> None:
    with windows.start("-c", STARTS) as process:
        assert process.stdout
        assert process.stdout.readline() == "started\n"
        wait_until(lambda: is_running("sleep(7777)"))
        process.kill()
    wait_until(lambda: not is_running("sleep(7777)"))


def is_running(words: str) -> bool:
    return words in subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout


def test_it_makes_and_removes_a_cluster(windows: Windows, tmp_path: Path) -> None:
    with simulate_servers(tmp_path) as servers:
        key = f"Z:{tmp_path}/state/{servers.name}/id_ed25519"
        names = ",".join(host.name for host in servers.hosts)
        given = ("--hosts", names, "--name", "lab", "--user", "root", "--key", key, "--prefix", "/mnt/cpuft")
        words = ("provision", "hosts", *given, "--wheels", f"Z:{tmp_path}/wheels", "--accept-host-keys")
        planned = windows.cpuft(*words, "--dry-run")
        lab = windows.home / ".local/state/cpuft/clusters/lab"
        assert (planned.returncode, lab.exists()) == (0, False), planned.stderr
        made = windows.cpuft(*words)
        assert made.returncode == 0, made.stderr
        assert servers.on(2, "test -x /mnt/cpuft/env/bin/cpuft; echo $?") == "0"
        assert windows.cpuft("provision", "diff", "lab").stdout == "cluster lab is as it was asked for\n"
        assert windows.cpuft("provision", "status", "lab").stdout.count("  up, ") == 2
        checked = windows.cpuft("doctor", "--cluster", "lab")
        assert "2 hosts, " in checked.stdout, checked.stderr
        down = windows.cpuft("provision", "down", "lab")
        assert (down.returncode, servers.on(2, "ls /mnt")) == (0, ""), down.stderr
        assert not lab.exists()


def test_it_starts_shows_stops_resumes_and_fetches_runs(windows: Windows, hosts: Simulated) -> None:
    attended = windows.cpuft("launch", *TRAINING, "--max-steps", "20", "--run-dir", "attended")
    assert attended.returncode == 0, attended.stderr
    begun = windows.cpuft("launch", *TRAINING, "--max-steps", "20", "--detach", "--run-dir", "detached")
    assert begun.returncode == 0, begun.stderr
    done = windows.cpuft("attach", "detached")
    assert (done.returncode, "step 20/20" in done.stderr) == (0, True), done.stderr
    records = [read_record(str(windows.home / name)) for name in ("attended", "detached")]
    assert [step.loss for step in records[0].steps] == [step.loss for step in records[1].steps]
    assert len({rank.host for rank in records[0].header.ranks}) == 2
    assert "step 20/20" in windows.cpuft("logs", begun.stdout.split()[-1]).stderr
    assert re.search(r"launch +detached .* ended, exit code 0 +.+detached\n", windows.cpuft("runs").stdout)
    reported = windows.cpuft("report", "attended", "detached")
    assert (reported.returncode, "2 ranks on 2 simulated hosts" in reported.stdout) == (0, True), reported.stderr
    started = windows.cpuft("launch", *TRAINING, "--max-steps", "4000", "--detach", "--run-dir", "stopped")
    assert started.returncode == 0, started.stderr
    wait_until(lambda: "step " in windows.cpuft("logs", "stopped").stderr)
    assert windows.cpuft("stop", "stopped").returncode == 0
    ended = windows.cpuft("attach", "stopped")
    assert (ended.returncode, "cpuft launch --resume" in ended.stderr) == (75, True), ended.stderr


CALLS = """
import os
import cpuft
def add(number):
    return number + int(os.environ["RANK"])
print(cpuft.launch(add, kwargs={"number": 40}, np=2, cluster="away", check=False).results)
"""


def test_a_function_runs_on_the_hosts_and_its_results_come_back(windows: Windows, hosts: Simulated) -> None:
    done = windows.python("-c", CALLS)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[40, 41]"]), done.stderr


INTERRUPTED = """
import _thread, sys, threading, time
from pathlib import Path
from cpuft.cli import main
def interrupt():
    while not Path("now").exists():
        time.sleep(0.1)
    _thread.interrupt_main()  # what Ctrl-C does to this process
threading.Thread(target=interrupt, daemon=True).start()
main(sys.argv[1:])
"""


def test_ctrl_c_saves_a_checkpoint_and_a_killed_head_leaves_no_rank(windows: Windows, hosts: Simulated) -> None:
    words = ("launch", *TRAINING, "--max-steps", "400", "--run-dir")
    with windows.start("-c", INTERRUPTED, *words, "asked") as process:
        wait_for_step(process)
        (windows.home / "now").touch()
        told = process.communicate(timeout=60)[0]
    assert (process.returncode, "cpuft launch --resume" in told) == (75, True), told
    resumed = windows.cpuft("launch", "--resume", "asked")
    assert (resumed.returncode, "step 400/400" in resumed.stderr) == (0, True), resumed.stderr
    with windows.start("-m", "cpuft", *words, "killed") as process:
        wait_for_step(process)
        assert count_ranks(hosts) > 0
        shown = windows.cpuft("stacks", "killed")
        assert (shown.returncode, "all_reduce" in shown.stdout) == (0, True), shown.stderr
        again = windows.cpuft("launch", "--resume", "killed")
        assert again.stderr.startswith("cpuft: error: another cpuft launch is working in the run folder"), again.stderr
        process.kill()
    wait_until(lambda: count_ranks(hosts) == 0)


def wait_for_step(process: subprocess.Popen[str]) -> None:
    assert process.stdout
    assert any(line.startswith("step ") for line in process.stdout)
