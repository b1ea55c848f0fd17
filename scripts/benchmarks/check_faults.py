"""Run by scripts/check-faults: disturb trainings on simulated hosts at random moments, and check how they end.

Each run is disturbed once and must end by itself with the metric of an undisturbed run. Without restarts, and if the
fault hit the launcher or the disk, the run is continued with `cpuft launch --resume` after the repair. With --detach,
each run is started with `cpuft launch --detach` and followed with `cpuft attach`. Needs root; everything happens in its
own namespaces.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpuft.launch.run_state import read_state
from cpuft.record import read_record
from cpuft.terminal import format_table
from tests.conftest import GLUE
from tests.provision.simulated import Simulated, own_root, simulate

HOSTS = ("kill worker", "pause worker", "cut worker", "kill master", "pause master", "cut master")
TWO = ("kill two",)
"""Two hosts, not the head host, at the same moment. One of them may be the second host with checkpoints."""
RANKS = ("SIGKILL rank", "SIGSTOP rank")
PROCESSES = ("SIGKILL ssh", "SIGKILL supervisor", "SIGKILL mpirun", "SIGKILL proxy")
LAUNCHER = ("SIGKILL launcher", "cut launcher")
"""The launcher, or `cpuft attach`, is killed, or loses the network to all hosts for a minute."""
HEAD = ("cut head from launcher",)
"""The launcher does not reach the head host any more, which trains on. Its other hosts reach it."""
DISK = ("fill disk",)
"""The disk of all hosts and of the launcher, which they share here, is full."""
NOT_DETACHED = ("SIGKILL ssh", *HEAD)
"""Kinds that a detached run does not have: its launcher is on the head host."""
KINDS = (*HOSTS, *TWO, *RANKS, *PROCESSES, *LAUNCHER, *HEAD, *DISK)
STAGES = ("send", "prepare", "start", "train", "checkpoint", "evaluate", "save", "fetch", "restart")
"""Stages of a run in their order. `restart`: while the run is restarted after another fault."""
WITH_RANKS = ("train", "checkpoint", "evaluate")
"""Stages in which all ranks and mpirun are certainly running."""


@dataclass(frozen=True)
class Fault:
    """One fault: what happens to which host, rank or process, and when."""

    kind: str
    number: int
    """Number of the rank or host, from 0. Each host has one rank; the head host is 0."""
    step: int
    """Number of updates before the fault, in the stages `train` and `checkpoint`."""
    stage: str = "train"

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of all hosts that the fault hits."""
        return (1, self.number) if self.kind in TWO else (self.number,)

    def describe(self) -> str:
        """Return the fault and its stage for the table."""
        number = f" {self.number}" if self.kind in (*HOSTS, *TWO, *RANKS) and "master" not in self.kind else ""
        return f"{self.kind}{number}, {self.stage}"


@dataclass(frozen=True)
class Target:
    """The host or rank that a fault has hit, as messages name it."""

    host: str = ""
    """Name of the host; empty if the fault hit neither a host nor a rank. Then any message will do that blames no
    host."""
    rank: int = -1
    others: tuple[str, ...] = ()
    """Hosts that no message may blame."""


def draw_faults(
    count: int,
    seed: int,
    nodes: int,
    steps: int,
    kinds: Sequence[str] = KINDS,
    stages: Sequence[str] = STAGES,
) -> list[Fault]:
    """Draw `count` faults: every stage about as often, and in each stage the kinds that can happen there."""
    chance = random.Random(seed)
    left = {stage: list[str]() for stage in stages}
    drawn: list[Fault] = []
    while len(drawn) < count:
        for stage in stages:
            possible = [kind for kind in kinds if stage in WITH_RANKS or kind not in (*RANKS, *PROCESSES)]
            if not possible:
                continue
            left[stage] = left[stage] or chance.sample(possible, len(possible))
            kind = left[stage].pop()
            moment = chance.choice(range(1, steps * 3 // 4))
            drawn.append(Fault(kind, _draw_number(kind, nodes, chance), moment, stage))
    return drawn[:count]


def _draw_number(kind: str, nodes: int, chance: random.Random) -> int:
    if kind in TWO:
        return chance.randrange(2, nodes)
    return 0 if "master" in kind or kind in HEAD else chance.randrange(1 if "worker" in kind else 0, nodes)


def was_named(target: Target, lines: Sequence[str]) -> bool:
    """Return whether the lines of a launch name the target, and no other host as lost."""
    marks = ("does not answer", "did not answer", "failed", "lost", "blocks the others", "killed", "No space", "full")
    text = "\n".join(line for line in lines if any(mark in line for mark in marks))
    blamed = [host for host in target.others if f"host {host} does not answer" in text]
    if not target.host:
        return bool(text) and not blamed
    own = rf"(?<![\w.-]){re.escape(target.host)}(?!\w)" if target.rank < 0 else rf"\brank {target.rank} on\b"
    return not blamed and bool(re.search(own, text))


_SECONDS = 60.0
_MARKS = ("cpuft.train", "cpuft.rank", "cpuft.launch.attempt", "mpiexec", "mpirun", "hydra", "pmi_proxy")


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _variables(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(word.partition("=")[::2] for word in text.split("\0"))


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def list_pids() -> list[int]:
    """Return the numbers of all processes except this one."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if int(path.name) != os.getpid()]


def list_ours() -> list[int]:
    """Return the numbers of all processes of a run on all hosts."""
    return [pid for pid in list_pids() if any(mark in word for word in _words(pid) for mark in _MARKS)]


def _is_detached_launch(words: Sequence[str]) -> bool:
    """Whether this is the command that a detached run executes on the head host."""
    return "launch" in words and any(word.startswith("--run-dir=/var/tmp/") for word in words)


def find_targets(fault: Fault, launch: int) -> list[int]:
    """Return the processes of which the fault hits one."""
    pids = {pid: words for pid in list_pids() if (words := _words(pid)) and words[0]}
    found = {
        "ssh": lambda pid, words: _parent(pid) == launch and os.path.basename(words[0]) == "ssh",
        "supervisor": lambda pid, words: "cpuft.launch.attempt" in words or _is_detached_launch(words),
        "mpirun": lambda pid, words: os.path.basename(words[0]) in ("mpiexec.hydra", "mpirun", "mpiexec"),
        "proxy": lambda pid, words: "proxy" in os.path.basename(words[0]),
        "rank": lambda pid, words: "cpuft.train" in words and _variables(pid).get("RANK") == str(fault.number),
    }
    is_one: Callable[[int, list[str]], bool] = found[fault.kind.split()[1]]
    return sorted(pid for pid, words in pids.items() if is_one(pid, words))


def make_fault(fault: Fault, cluster: Simulated, launch: int) -> Target:
    """Cause the fault and return its target. Waits for a process that has not started yet."""
    names = [host.name for host in cluster.hosts]
    others = tuple(name for number, name in enumerate(names) if number not in fault.numbers)
    if fault.kind in LAUNCHER[:1]:
        os.kill(launch, signal.SIGKILL)
        return Target()
    if fault.kind in (*LAUNCHER, *HEAD):
        cut_from_here(names[:1] if fault.kind in HEAD else names)
        return Target(names[0] if fault.kind in HEAD else "", others=others if fault.kind in HEAD else ())
    if fault.kind in DISK:
        _fill(cluster)
        return Target(others=tuple(names))
    if fault.kind in (*HOSTS, *TWO):
        verb = ("provision", "local", "--name", cluster.name, fault.kind.split()[0])
        makers = [threading.Thread(target=cluster.cpuft, args=(*verb, str(number + 1))) for number in fault.numbers]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()
        return Target(names[fault.number], others=others)
    end = time.monotonic() + _SECONDS
    while not (found := find_targets(fault, launch)) and time.monotonic() < end:
        time.sleep(0.05)
    assert found, f"no process for {fault}"
    os.kill(found[fault.number % len(found)], signal.Signals[fault.kind.split()[0]])
    if fault.kind in PROCESSES:
        return Target(others=tuple(names))
    return Target(names[fault.number], fault.number, others=tuple(names))


def cut_from_here(addresses: Sequence[str]) -> None:
    """Drop all packets to these hosts, as a network that is gone does; none: end this."""
    subprocess.run(("ip", "route", "flush", "type", "blackhole"), check=True)
    for address in addresses:
        subprocess.run(("ip", "route", "add", "blackhole", f"{address}/32"), check=True)


def _fill(cluster: Simulated) -> None:
    left = shutil.disk_usage(cluster.folder).free
    subprocess.run(("fallocate", "-l", str(left), str(cluster.folder / _FILLS)), check=False)


_FILLS = "fills-the-disk"
END_SECONDS = 180.0
_FETCHED_AGAIN = "its results are fetched again in"
"""What `cpuft launch` says of a run that has finished on a host that does not answer."""
_START_SECONDS = 300.0


class Launch:
    """A running `cpuft launch` on all hosts or `cpuft attach`, and its lines with the time of each."""

    def __init__(self, cluster: Simulated, verb: str, *words: str) -> None:
        environ = {**os.environ, "CPUFT_STATE": str(cluster.folder / "state")}
        self.begun, self.lines, self.ended_at = time.monotonic(), list[tuple[float, str]](), 0.0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cpuft", verb, "--cluster", cluster.name, *words],
            cwd=cluster.folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))
        self.ended_at = time.monotonic()

    def wait(self, seconds: float = _START_SECONDS) -> int:
        """Return the exit code. A launch that does not end in time is killed, and the code is -9."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._thread.join(10)
        return self.process.wait()

    def wait_for(self, words: str, seconds: float) -> bool:
        """Wait until a line contains a text. Return False if the launch ends before, or after the time limit."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            if any(words in line for _, line in self.lines):
                return True
            time.sleep(0.1)
        return False

    def waits_for_host(self, since: float, seconds: float) -> bool:
        """Wait until the launch does without a host, or waits for one. Return False if it ends before.

        It does without it when an update follows on a restart. It waits for it when it fetches the results again.
        """
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            lines = [line for at, line in self.lines if at >= since]
            begun = next(
                (number for number, line in enumerate(lines) if line.startswith("cpuft: restart ")), len(lines)
            )
            if any(line.startswith("step ") for line in lines[begun:]) or any(_FETCHED_AGAIN in line for line in lines):
                return True
            time.sleep(0.1)
        return False

    def texts(self, since: float = 0.0) -> list[str]:
        """Return the lines since a moment."""
        return [line for at, line in self.lines if at >= since and line]

    def seconds_to_go_on(self, since: float) -> float:
        """Return the seconds from a fault to the first update after a restart, or to the end of the launch."""
        restarts = [at for at, line in self.lines if at >= since and line.startswith("cpuft: restart ")]
        goes_on = [at for at, line in self.lines if restarts and at > restarts[-1] and line.startswith("step ")]
        return min(goes_on, default=self.ended_at) - since

    def seconds_to(self, words: str, since: float) -> str:
        """Return the seconds from a moment to the first line with a text; empty if there is none."""
        return next((f"{at - since:.0f}" for at, line in self.lines if at >= since and words in line), "")


_DETACH = "--detach"


def begin(cluster: Simulated, run: str, words: Sequence[str]) -> Launch:
    """Start a run; return what shows it."""
    if _DETACH not in words:
        return Launch(cluster, "launch", "--run-dir", run, *words)
    started = cluster.cpuft("launch", "--cluster", cluster.name, "--run-dir", run, *words)
    return Launch(cluster, "attach", run) if not started.returncode else sys.exit(started.stderr)


def restart_words(restarts: int) -> tuple[str, ...]:
    """Return the option of `cpuft launch` that allows restarts."""
    return ("--max-restarts", str(restarts))


def _disks(cluster: Simulated) -> list[Path]:
    return sorted((cluster.folder / "state" / cluster.name / "nodes").glob("*/upper/var/tmp/cpuft-*"))


def _count_steps(records: Sequence[str]) -> int:
    return max((text.count('"kind": "step"') for text in records), default=0)


def has_come_to(stage: str, step: int, steps: int, cluster: Simulated, run: str) -> bool:
    """Return whether a run has reached a stage, by the files on the disks of the hosts."""
    folders = [folder for disk in _disks(cluster) for folder in disk.glob(f"*/{run}")]
    if stage == "send":
        return any(list(disk.glob("*/state.json")) for disk in _disks(cluster))
    if stage == "prepare":
        return any((folder / "logs").is_dir() for folder in folders)
    if stage == "start":
        return any((folder / "logs/mpirun.log").exists() for folder in folders)
    records = [path.read_text(errors="replace") for folder in folders if (path := folder / "record.jsonl").exists()]
    if stage == "train":
        return _count_steps(records) >= step
    if stage == "checkpoint":
        return any(list(folder.glob("checkpoints/*.new")) for folder in folders) and _count_steps(records) > 0
    if stage == "evaluate":
        return _count_steps(records) >= steps
    if stage == "save":
        return any('"kind": "evaluation"' in text for text in records)
    states = [read_state(str(folder)) for folder in folders]
    return any(state and state.exit_code >= 0 for state in states)  # the results are fetched now


def wait_for_stage(launch: Launch, cluster: Simulated, run: str, stage: str, step: int, steps: int) -> bool:
    """Wait until a run has reached a stage. Return False if the launch has ended before."""
    end = time.monotonic() + _START_SECONDS
    while launch.process.poll() is None and time.monotonic() < end:
        if has_come_to(stage, step, steps, cluster, run):
            return True
        time.sleep(0.02)
    return False


@dataclass(frozen=True)
class Outcome:
    """Result of a run that has ended."""

    updates: str
    metric: str
    repeated: str
    left: list[str]
    """Processes, segments of shared memory and files that the run has left on any host."""


def read_outcome(cluster: Simulated, run: str, steps: int) -> Outcome:
    """Read the result of a run that has ended."""
    left = [f"process {pid}: {' '.join(_words(pid))[:300]}" for pid in list_ours()]
    for index in range(1, len(cluster.hosts) + 1):
        left += [f"memory {name}" for name in cluster.on(index, "ls /dev/shm").split()]
    # The order and the events of a detached run stay, so that it can be looked at again.
    mine = [path for disk in _disks(cluster) for path in (*disk.iterdir(), *disk.glob("detached/*/run"))]
    left += [str(path) for path in mine if path.name not in ("inputs", "detached")]
    if not (cluster.folder / run / "record.jsonl").exists():
        return Outcome("0", "", "", left)
    record = read_record(str(cluster.folder / run))
    numbers = [step.step for step in record.steps]
    in_order = numbers == list(range(1, len(numbers) + 1))
    metric = f"{record.metrics['accuracy']:.4f}" if record.footer and "accuracy" in record.metrics else ""
    repeated = str(sum(line.repeated for line in record.resumptions))
    return Outcome(str(len(numbers)) if in_order else f"NOT IN ORDER {numbers}", metric, repeated, left)


NODES = 4
_ENTER = """set -eu
mount --make-rprivate /
mount -t tmpfs -o mode=1777,size=2g tmpfs /dev/shm
mount -t tmpfs -o mode=1777 tmpfs /var/tmp
ip link set dev lo up
"$@" || exit $?
exit 0
"""
"""The shell stays the first process, so that it reaps the processes of hosts that are killed."""
_SPACES = ("--mount", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
_INSIDE = "CPUFT_FAULTS_INSIDE"
COLUMNS = [
    "fault, stage",
    "line that names it",
    "named",
    "code",
    "on after s",
    "bar",
    "repeated",
    "updates",
    "metric",
    "left",
]
BARS = {"kill": 25, "SIGKILL": 25, "cut": 54}
"""Most seconds from a fault to the next update or to the end, by the kind of the fault. Other faults, which are found
by the time limit of a collective, have `OTHER_BAR`."""
OTHER_BAR = 58


def main() -> None:
    """Exit with 1 if a run missed a bar: its metric, the time, the message, or what was left."""
    parser = argparse.ArgumentParser(prog="check-faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--skip", type=int, default=0, help="leave out this many of the faults, the first ones")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the faults and their moments")
    parser.add_argument(
        "--restarts", type=int, default=0, help="--max-restarts of each run; 0: each run is resumed by hand"
    )
    parser.add_argument("--steps", type=int, default=30, help="updates of each run")
    parser.add_argument("--only", default="", help="only kinds whose name contains this text")
    parser.add_argument("--detach", action="store_true", help="start each run detached, and follow it with attach")
    parser.add_argument("--stages", default=",".join(STAGES), help="stages of a run in which faults happen")
    options = parser.parse_args()
    if not os.environ.get(_INSIDE):
        words = [sys.executable, "-m", "scripts.benchmarks.check_faults", *sys.argv[1:]]
        os.execvpe(
            "unshare", ["unshare", *_SPACES, "sh", "-c", _ENTER, "in", *words], dict(os.environ) | {_INSIDE: "1"}
        )
    kinds = [kind for kind in KINDS if options.only in kind and not (options.detach and kind in NOT_DETACHED)]
    faults = draw_faults(options.faults, options.seed, NODES, options.steps, kinds, options.stages.split(","))
    with tempfile.TemporaryDirectory() as folder:
        more = (_DETACH,) if options.detach else ()
        sys.exit(run(Path(folder), faults[options.skip :], options.steps, options.restarts, more))


def run(folder: Path, faults: Sequence[Fault], steps: int, restarts: int, more: tuple[str, ...] = ()) -> int:
    """Cause all faults, one after another, and print the table. Returns 1 if a bar was missed."""
    os.environ |= {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    with own_root(folder) as image, simulate(image.parent, *_hosts(image)) as cluster:
        words = (*job(steps), *restart_words(restarts), *more)
        whole = read_outcome(cluster, run_whole(cluster, words), steps)
        rows, bad = [["none", "", "", "0", "", "", "", whole.updates, whole.metric, str(len(whole.left))]], 0
        for number, fault in enumerate(faults):
            row, good = disturb(cluster, f"run-{number}", fault, words, steps, restarts, whole.metric)
            rows.append(row)
            bad += not good
            print(
                f"{'good' if good else 'BAD '} {number + 1}/{len(faults)} {' | '.join(row)}",
                file=sys.stderr,
                flush=True,
            )
    print(format_table(COLUMNS, rows, left=2, width=220))
    print(f"check-faults: {len(faults)} faults, {bad} that missed a bar")
    return 1 if bad else 0


def _hosts(image: Path) -> tuple[str, ...]:
    """Return the options of the cluster, which must be the same for making and for repairing it."""
    return ("--nodes", str(NODES), "--image", str(image))


def job(steps: int) -> tuple[str, ...]:
    """Return the options of the training: MRPC if its data lies beside the checkout, else the built-in task."""
    data = ("--task", "mrpc", "--data-dir", str(GLUE)) if GLUE.is_dir() else ("--task", "demo")
    rows = ("--max-steps", str(steps), "--batch-size", "4", "--max-length", "24", "--learning-rate", "1e-4")
    return (*data, *rows, "--np", str(NODES), "--comm-timeout", "20", "--checkpoint-every", "3", *SAME)


SAME = ("--backend", "mpi", "--grad-compression", "none")
"""Without these options a restart on fewer hosts might choose others, and reach another metric."""


def run_whole(cluster: Simulated, words: Sequence[str]) -> str:
    """Run without a fault, and return the name of the run."""
    launch = begin(cluster, "whole", words)
    if launch.wait():
        sys.exit("\n".join(["check-faults: the undisturbed run failed:", *launch.texts()]))
    return "whole"


def disturb(
    cluster: Simulated, run: str, fault: Fault, words: Sequence[str], steps: int, restarts: int, whole: str
) -> tuple[list[str], bool]:
    """Start a run, cause the fault and wait for the end. Returns a row of the table, and whether all bars were met."""
    launch = begin(cluster, run, words)
    reached = wait_for_stage(
        launch, cluster, run, "train" if fault.stage == "restart" else fault.stage, fault.step, steps
    )
    if reached and fault.stage == "restart":
        make_fault(Fault("SIGKILL rank", 1, fault.step), cluster, launch.process.pid)
        reached = launch.wait_for("cpuft: restart 1 ", END_SECONDS)
        time.sleep(fault.step % 4)
    if not reached:
        return [fault.describe(), f"it had ended before: {launch.texts()[-1:]}", *[""] * 8], False
    made_at = time.monotonic()
    target = make_fault(fault, cluster, launch.process.pid)
    # A host that comes back while the run goes on without it is tidied up when that ends. A run that has finished is
    # not trained again: its launch waits for the host that has the results.
    if launch.waits_for_host(made_at, END_SECONDS):
        repair(cluster)
    ended = launch.wait(END_SECONDS + (restarts + 1) * 120)
    told = next((line for line in launch.texts(since=made_at) if was_named(target, [line])), "")
    named = bool(told) and was_named(target, launch.texts(since=made_at))
    again = launch.seconds_to_go_on(made_at)
    repair(cluster)
    # Nobody restarts a run without its launcher, nor one whose disk is full.
    by_hand = not restarts or fault.kind in (*LAUNCHER, *DISK) or _DETACH in words
    if ended and by_hand:
        if _DETACH in words and fault.kind in LAUNCHER:
            ended = Launch(cluster, "attach", run).wait(END_SECONDS)
        else:
            _, refused = go_on(cluster, run, words)
            told = " / ".join([told, refused]) if refused else told
    outcome = read_outcome(cluster, run, steps)
    # What a host has that was still away at the end cannot be removed: the launch says so, and the doctor finds it.
    away = [line for line in launch.texts(since=made_at) if "did not answer at the end" in line]
    left = [path for path in outcome.left if not (away and any(f"/nodes/{n + 1}/" in path for n in fault.numbers))]
    bar = next((seconds for kind, seconds in BARS.items() if kind in fault.kind), OTHER_BAR)
    # A run that ends well all the same, because only its fetching or cleaning up was disturbed, need not blame anybody.
    named = named or (not ended and not launch.seconds_to("cpuft: restart ", made_at)) or fault.kind == LAUNCHER[0]
    good = named and again <= bar and not left and (outcome.updates, outcome.metric) == (str(steps), whole)
    row = [fault.describe(), told[-70:], "yes" if named else "NO", str(ended), f"{again:.0f}", str(bar)]
    row += [outcome.repeated, outcome.updates, outcome.metric, str(len(left))]
    if not good:
        lines = [f"{at - made_at:7.1f} {line}" for at, line in launch.lines if at > made_at - 20]
        print("\n".join([*lines[-60:], *left]), file=sys.stderr, flush=True)
    for pid in list_ours():
        os.kill(pid, signal.SIGKILL)
    # The next fault must not find what this one has left, nor a disk that is full of it.
    for path in (*map(Path, outcome.left), cluster.folder / run):
        shutil.rmtree(path, ignore_errors=True)
    return row, good


def repair(cluster: Simulated) -> None:
    """Repair all hosts of the cluster, the network of this machine, and its disk."""
    cut_from_here(())
    (cluster.folder / _FILLS).unlink(missing_ok=True)
    repaired = cluster.cpuft("provision", "local", "--name", cluster.name, *_hosts(cluster.folder / "image"))
    assert repaired.returncode == 0, repaired.stderr


def go_on(cluster: Simulated, run: str, words: Sequence[str]) -> tuple[str, str]:
    """Resume a run, or start it again if it was lost before it began.

    Returns the seconds until it continued, and its error, if any.
    """
    resumed = Launch(cluster, "launch", "--no-check", "--resume", run)
    resumed.wait()
    said = "".join(resumed.texts()[-1:])
    if "is still active" in said and _DETACH in words:
        resumed = Launch(cluster, "attach", run)
        resumed.wait()
    elif "has recorded no update" in said or "give the folder of an earlier run" in said:
        shutil.rmtree(cluster.folder / run, ignore_errors=True)
        resumed = Launch(cluster, "launch", "--run-dir", run, *(word for word in words if word != _DETACH))
        resumed.wait()
    seconds, code = resumed.seconds_to("resumed after update", resumed.begun), resumed.process.returncode
    if code:
        print("\n".join(["going on with it:", *resumed.texts()[-12:]]), file=sys.stderr, flush=True)
    return seconds, f"going on: code {code}" if code else ""


if __name__ == "__main__":
    main()
