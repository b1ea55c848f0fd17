"""Run by scripts/check-faults: faults of every kind at random moments of trainings on simulated hosts with own disks.

Each run is disturbed once, and must end by itself; without restarts it goes on by `cpuft launch --resume` once the host
is back. Root; everything happens in namespaces of its own.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from cpuft.terminal import format_table
from tests.conftest import GLUE
from tests.faults.kinds import KINDS, STAGES, Fault, draw_faults, was_named
from tests.faults.launches import END_SECONDS, Launch, read_outcome, restart_words, wait_for_stage
from tests.faults.processes import list_ours, make_fault
from tests.provision.simulated import Simulated, own_root, simulate

NODES = 4
_ENTER = """set -eu
mount --make-rprivate /
mount -t tmpfs -o mode=1777,size=2g tmpfs /dev/shm
mount -t tmpfs -o mode=1777 tmpfs /var/tmp
ip link set dev lo up
"$@" || exit $?
exit 0
"""
"""The shell stays, as the first process: it takes in what hosts leave behind when they are killed."""
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
BARS = {"kill": 25, "SIGKILL": 25, "cut": 40}
"""Seconds from a fault to the next update or the end; of a frozen host or rank, the deadline of a collective more."""
OTHER_BAR = 60


def main() -> None:
    """Exit 1 when a run did not end or reach its last update, somebody else was named, or something is left."""
    parser = argparse.ArgumentParser(prog="check-faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other faults and moments")
    parser.add_argument("--restarts", type=int, default=0, help="as of cpuft launch; 0: each run is resumed by hand")
    parser.add_argument("--steps", type=int, default=30, help="updates of each run")
    parser.add_argument("--only", default="", help="kinds whose name holds this text")
    parser.add_argument("--stages", default=",".join(STAGES), help="in which stages of a run")
    options = parser.parse_args()
    if not os.environ.get(_INSIDE):
        words = [sys.executable, "-m", "tests.check_faults", *sys.argv[1:]]
        os.execvpe(
            "unshare", ["unshare", *_SPACES, "sh", "-c", _ENTER, "in", *words], dict(os.environ) | {_INSIDE: "1"}
        )
    kinds = [kind for kind in KINDS if options.only in kind]
    faults = draw_faults(options.faults, options.seed, NODES, options.steps, kinds, options.stages.split(","))
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(run(Path(folder), faults, options.steps, options.restarts))


def run(folder: Path, faults: Sequence[Fault], steps: int, restarts: int) -> int:
    """Make all faults, one after another, and print the table; 1 when a bar was missed."""
    os.environ |= {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    with own_root(folder) as image, simulate(image.parent, *_hosts(image)) as cluster:
        words = (*job(steps), *restart_words(restarts))
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
    """Options of the cluster, the same to make it and to repair it: others would make other hosts."""
    return ("--nodes", str(NODES), "--image", str(image))


def job(steps: int) -> tuple[str, ...]:
    """Words of the training: MRPC where it is beside the checkout, else the built-in task."""
    data = ("--task", "mrpc", "--data-dir", str(GLUE)) if GLUE.is_dir() else ("--task", "demo")
    rows = ("--max-steps", str(steps), "--batch-size", "4", "--max-length", "48", "--learning-rate", "1e-4")
    return (*data, *rows, "--np", str(NODES), "--comm-timeout", "20", "--checkpoint-every", "3", *SAME)


SAME = ("--backend", "mpi", "--grad-compression", "none")
"""Otherwise measured at every start, and chosen otherwise on fewer hosts: the metric would be another one."""


def run_whole(cluster: Simulated, words: Sequence[str]) -> str:
    """A run that nobody disturbs."""
    launch = Launch(cluster, "whole", words)
    if launch.wait():
        sys.exit("\n".join(["check-faults: the undisturbed run failed:", *launch.texts()]))
    return "whole"


def disturb(
    cluster: Simulated, run: str, fault: Fault, words: Sequence[str], steps: int, restarts: int, whole: str
) -> tuple[list[str], bool]:
    """Start a run, make the fault, see how it ends and goes on; a row of the table, and whether all bars were met."""
    launch = Launch(cluster, run, words)
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
    # A host that comes back while the run goes on without it is tidied up when that ends.
    if restarts and launch.wait_for_line_since("step ", "cpuft: restart ", made_at, END_SECONDS):
        repair(cluster)
    ended = launch.wait(END_SECONDS + (restarts + 1) * 120)
    told = next((line for line in launch.texts(since=made_at) if was_named(target, [line])), "")
    named = bool(told) and was_named(target, launch.texts(since=made_at))
    again = launch.seconds_to_go_on(made_at)
    repair(cluster)
    if ended and not restarts:
        _, refused = go_on(cluster, run, words)
        told = " / ".join([told, refused]) if refused else told
    outcome = read_outcome(cluster, run, steps)
    # What a host has that was still away at the end cannot be removed: the launch says so, and the doctor finds it.
    away = [line for line in launch.texts(since=made_at) if "did not answer at the end" in line]
    left = [path for path in outcome.left if not (away and any(f"/nodes/{n + 1}/" in path for n in fault.numbers))]
    bar = next((seconds for kind, seconds in BARS.items() if kind in fault.kind), OTHER_BAR)
    # A run that ends well all the same, because only its fetching or cleaning up was disturbed, need not blame anybody.
    named = named or (not ended and not launch.seconds_to("cpuft: restart ", made_at))
    good = named and again <= bar and not left and (outcome.updates, outcome.metric) == (str(steps), whole)
    row = [fault.describe(), told[-70:], "yes" if named else "NO", str(ended), f"{again:.0f}", str(bar)]
    row += [outcome.repeated, outcome.updates, outcome.metric, str(len(left))]
    if not good:
        lines = [f"{at - made_at:7.1f} {line}" for at, line in launch.lines if at > made_at - 20]
        print("\n".join([*lines[-60:], *left]), file=sys.stderr, flush=True)
    for pid in list_ours():
        os.kill(pid, signal.SIGKILL)
    return row, good


def repair(cluster: Simulated) -> None:
    """Every host is there again."""
    repaired = cluster.cpuft("provision", "local", "--name", cluster.name, *_hosts(cluster.folder / "image"))
    assert repaired.returncode == 0, repaired.stderr


def go_on(cluster: Simulated, run: str, words: Sequence[str]) -> tuple[str, str]:
    """Go on with a run, or begin anew where it was lost before it had begun; seconds until then, and a refusal."""
    resumed = Launch(cluster, run, ("--no-check",), resume=True)
    resumed.wait()
    if "give the folder of an earlier run, for example runs/mrpc-np2" in "".join(resumed.texts()[-1:]):
        resumed = Launch(cluster, run, words)
        resumed.wait()
    seconds, code = resumed.seconds_to("resumed after update", resumed.begun), resumed.process.returncode
    if code:
        print("\n".join(["going on with it:", *resumed.texts()[-12:]]), file=sys.stderr, flush=True)
    return seconds, f"going on: code {code}" if code else ""


if __name__ == "__main__":
    main()
