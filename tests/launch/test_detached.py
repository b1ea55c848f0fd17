"""Runs that go on without the machine that started them."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

import cpuft
from cpuft.cli import cli
from cpuft.config.launch import LaunchConfig
from cpuft.errors import CpuftError
from cpuft.execute import Answer
from cpuft.hosts.cluster import Access, find_access, read_hosts
from cpuft.hosts.hostfile import Host
from cpuft.hosts.registry import NO_CLUSTER, Entry
from cpuft.hosts.transport import SshTransport
from cpuft.launch import detached, find_runs
from cpuft.launch.detached import (
    Detached,
    Head,
    examine_python,
    plan_move,
    refuse_jobs,
)
from cpuft.launch.detached_head import Description, Event, Order
from cpuft.launch.find_runs import choose_folder, find_run
from cpuft.launch.inputs import LaunchNote, save_note
from cpuft.launch.run_locks import lock_run
from cpuft.launch.run_state import RunState, write_state
from cpuft.launch.secret_files import plan_secrets
from cpuft.record import read_record
from tests.conftest import wait_until
from tests.launch.test_plan import make_cluster
from tests.provision.simulated import Simulated, needs_root, own_root, simulate
from tests.system import imitate
from tests.train.tiny import save_tiny

TEXTS = (
    *("--np", "2", "--task", "text", "--train-file", "book.txt", "--max-length", "32", "--precision", "fp32"),
    *("--model", "tiny"),
)
QUIET = (
    *("--dropout", "0", "--backend", "gloo", "--no-save-model", "--no-check", "--no-fast-path", "--seed", "7"),
    *("--grad-compression", "none"),
)
STEPS = ("--max-steps", "6", "--eval-every", "3")


WAITS = """
import os, pathlib, time
kind = "resumed" if "CPUFT_RESUMED" in os.environ else "begun"
if os.environ["RANK"] == "0":
    pathlib.Path(os.environ["CPUFT_RUN_DIR"], kind).touch()
time.sleep(60 if kind == "begun" else 0)
"""


@dataclass(frozen=True)
class Answers(SshTransport):
    """Hosts that give one answer after another to everything."""

    answers: list[Answer] = field(default_factory=list, compare=False)

    def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 60.0) -> Answer:
        return self.answers.pop(0)


def make_head(*answers: Answer) -> Head:
    return Head(
        Host("node1"),
        Access(Answers(answers=list(answers)), replace(NO_CLUSTER, python="/env/bin/python")),
        ("--cluster=lab",),
    )


@pytest.mark.parametrize(
    "config, environ, what",
    [
        (LaunchConfig(), {"SLURM_JOB_ID": "1"}, "a Slurm job"),
        (LaunchConfig(), {"CPUFT_JOB": "/x/lab"}, "a job of AWS Batch"),
        (LaunchConfig(), {"K_MPI_JOB_ROLE": "launcher"}, "an MPIJob"),
        (LaunchConfig(cluster="lab"), {"SLURM_JOB_ID": "1"}, ""),
        (LaunchConfig(hostfile="hosts"), {"SLURM_JOB_ID": "1"}, ""),
        (LaunchConfig(), {}, ""),
    ],
)
def test_a_job_needs_no_detached_run(config: LaunchConfig, environ: dict[str, str], what: str) -> None:
    message = f"^this command runs in {what}, .*: leave out --detach$"
    with pytest.raises(CpuftError, match=message) if what else nullcontext():
        refuse_jobs(config, environ)


@pytest.mark.parametrize(
    "answer, reason",
    [
        (Answer(127, "", "sh: not found"), "/env/bin/python, cannot import cpuft (sh: not found): install it there"),
        (Answer(0, ""), "/env/bin/python, cannot import cpuft (exit code 0): install it there"),
        (Answer(0, "[]"), "/env/bin/python, cannot import cpuft (exit code 0): install it there"),
        (Answer(0, "{ hello"), "/env/bin/python, cannot import cpuft (exit code 0): install it there"),
        (
            Answer(1, "", "x\nNo module named 'cpuft'\n"),
            "/env/bin/python, cannot import cpuft (No module named 'cpuft')",
        ),
        (Answer(0, '["0.0.1"]\n'), "host node1 has cpuft 0.0.1, and this machine has"),
        (Answer(0, f'hello\n["{cpuft.__version__}", "optuna"]\n'), "lacks optuna, which the command needs: install"),
    ],
)
def test_a_python_that_cannot_run_the_command_is_found_before_the_start(answer: Answer, reason: str) -> None:
    with pytest.raises(CpuftError) as caught:
        examine_python(make_head(answer), ("optuna",))
    assert reason in str(caught.value)
    examine_python(make_head(Answer(0, f'["{cpuft.__version__}"]')))


def test_what_is_moved_with_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files under their paths there, the hosts as mpirun there knows them, and no secret."""
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("text,label\na,0\n")
    ssh_config = "/opt/cpuft/clusters/lab/ssh_config"
    access = Access(SshTransport(), Entry("lab", "hosts", "", python="/env/bin/python", ssh_config_there=ssh_config))
    hosts = (Host("node1", 2, "ada", 2201), Host("node2", port=2202))
    cluster = replace(make_cluster((1, 1)), access=access, works_remotely=True, uid=1000)
    pairs = zip(cluster.assignments, hosts)
    cluster = replace(cluster, assignments=tuple(replace(one, host=host) for one, host in pairs))
    given = {"train_file": "rows.csv", "task": "files", "cluster": "lab", "save_model": False, "detach": True, "np": 2}
    environ = {"OMP_NUM_THREADS": "3", "HF_TOKEN": "secret", "OTHER": "x"}
    order, (bundle,) = plan_move("launch", given, (), cluster, "/home/ada/runs/x", environ)
    sent = f"{bundle.remote_folder}/rows.csv"
    folder = f"/var/tmp/cpuft-1000/detached/{order.id}"
    assert order.arguments == (
        *("launch", f"--train-file={sent}", "--task=files", "--no-save-model", "--np=2", "--no-check"),
        f"--run-dir={folder}/run/x",
    )
    assert (order.settings, order.names) == ({"OMP_NUM_THREADS": "3"}, {sent: str(tmp_path / "rows.csv")})
    assert order.files["hostfile"] == "node1 slots=2\nnode2\n"
    assert order.files["ssh_config"] == "Include /opt/cpuft/clusters/lab/ssh_config\n"
    entry = json.loads(order.files["cluster.json"])
    assert (entry["here"], entry["ssh_config"]) == ("node1", f"{folder}/lab/ssh_config")
    assert "secret" not in str(order)
    # There, the command finds these hosts and that it is on the first one.
    place = tmp_path / "lab"
    place.mkdir()
    for name, text in order.files.items():
        (place / name).write_text(text.replace(f"{folder}/lab", str(place)))
    monkeypatch.setenv("CPUFT_JOB", str(place))
    there = find_access(LaunchConfig())
    assert [there.transport.is_here(host) for host in read_hosts(LaunchConfig())] == [True, False]
    # The command there gives the run the id that was chosen here.
    assert replace(cluster, token="another").work_dir(order.run_dir) == f"/var/tmp/cpuft-1000/{order.claimed}"
    assert order.claimed == f"{order.id}/x"


def test_ssh_on_the_head_host_takes_the_configuration_of_a_mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config"
    config.write_text("UseKeychain yes\nHost node1\n  Port 2201\n")
    cluster = replace(make_cluster((1, 1)), access=Access(SshTransport(str(config))), works_remotely=True)
    monkeypatch.setattr(sys, "platform", "darwin")
    order, _ = plan_move("launch", {"np": 2}, (), cluster, "/Users/ada/runs/x", {})
    config.write_text(order.files["ssh_config"])
    shown = subprocess.run(["ssh", "-G", "-F", config, "node1"], capture_output=True, text=True, check=True)
    assert "port 2201\n" in shown.stdout


def test_what_is_moved_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import helper\n")
    Path("helper.py").write_text("")
    cluster = replace(make_cluster((1,)), works_remotely=True)
    script = ("train.py", "--lr", "1e-4")
    order, (bundle,) = plan_move("launch", {"np": 1}, script, cluster, "/runs/x", {})
    assert order.arguments[-5:] == ("--", "python", f"{bundle.remote_folder}/train.py", "--lr", "1e-4")
    assert [path.name for path in bundle.sources] == ["helper.py", "train.py"]


def test_a_command_on_its_own_head_host_keeps_its_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"hostfile": "hosts", "np": 2}
    order, bundles = plan_move("launch", given, (), make_cluster((2,)), "/runs/x", {})
    assert order.arguments == ("launch", "--hostfile=hosts", "--np=2", "--no-check", "--run-dir=/runs/x")
    assert (order.work_folder, order.claimed, order.files, bundles) == (str(tmp_path), "", {}, ())


ORDER = Order("0123456789ab", "launch", "/var/tmp/there/x", (), cluster="lab")
FOUND = Description(ORDER, "running", "", 1.0, has_results=True)
RUN = Detached(make_head(), ORDER, "")


def test_results_go_where_this_machine_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may say anything about the folder of the run."""
    monkeypatch.chdir(tmp_path)
    assert choose_folder(RUN, FOUND, "").run_dir == f"{tmp_path}/runs/x"
    assert (
        choose_folder(RUN, Description(replace(ORDER, run_dir="/root/.ssh"), "running", "", 1.0), "").run_dir
        == f"{tmp_path}/runs/.ssh"
    )
    assert choose_folder(RUN, FOUND, "here").run_dir == f"{tmp_path}/here"
    assert choose_folder(replace(RUN, run_dir="/named"), FOUND, "").run_dir == "/named"
    with pytest.raises(CpuftError, match=r"calls the run '\.\.'"):
        choose_folder(RUN, Description(replace(ORDER, run_dir="/x/.."), "running", "", 1.0), "")
    (tmp_path / "runs" / "x").mkdir(parents=True)
    with pytest.raises(CpuftError, match="exists already"):
        choose_folder(RUN, FOUND, "")
    write_state("runs/x", RunState("0123456789ab", "x"))
    assert choose_folder(RUN, FOUND, "").run_dir == f"{tmp_path}/runs/x"


def test_a_run_is_found_by_a_part_of_its_id_that_no_other_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    both = [FOUND, replace(FOUND, order=replace(ORDER, id="01aa00000000", run_dir="/var/tmp/there/y"))]
    monkeypatch.setattr(find_runs, "list_runs", lambda config: ([(RUN.head, one) for one in both], []))
    environ, config = {"CPUFT_STATE": str(tmp_path / "state")}, LaunchConfig(hostfile="hosts")
    assert find_run("012", config, environ)[0].order.id == ORDER.id
    write_state(str(tmp_path), RunState("01aa00000000", "y"))
    assert find_run(str(tmp_path), config, environ)[0].order.id == "01aa00000000"
    with pytest.raises(CpuftError, match=r"begin with 01 \(0123456789ab, 01aa00000000\): give more of the id"):
        find_run("01", config, environ)
    for name in ("77", ""):
        with pytest.raises(CpuftError, match=f"there is no detached run {name}: see cpuft runs"):
            find_run(name, config, environ)


def test_a_viewer_reads_on_where_its_connection_broke(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A line that was cut is shown once. Paths are those of this machine, and the line with the run folder waits."""
    events = [
        Event("errors", "step 1/2 of /var/tmp/inputs/rows.csv\n"),
        Event("errors", "step 2/2 in /var/tmp/there/x\n"),
        Event("output", "run: /var/tmp/there/x\n"),
        Event("end", code=3),
    ]
    lines = [f"{number} {json.dumps(asdict(event))}\n" for number, event in enumerate(events, start=1)]
    answers = {"0": "hello\n" + lines[0] + lines[1][:20], "1": "".join(lines[1:])}
    monkeypatch.setattr(Head, "from_here", lambda self, command: ("printf", "%s", answers[command[-1]]))
    monkeypatch.setattr(detached, "_RETRY_SECONDS", 0.0)
    order = replace(ORDER, names={"/var/tmp/inputs/rows.csv": "rows.csv"})
    assert Detached(make_head(), order, "/home/runs/x").show() == 3
    assert capfd.readouterr() == ("", "step 1/2 of rows.csv\nstep 2/2 in /home/runs/x\n")


@pytest.mark.parametrize(
    "text",
    [
        '{"kind": "end", "place": "moon"}',
        '{"kind": "end", "code": "0"}',
        '{"kind": "end", "code": 1e400}',
        '{"kind": "end", "text": "\\ud800"}',
        '{"kind": ' + "[" * 10**5 + "}",
        '{"kind": }',
    ],
)
def test_events_that_no_cpuft_of_this_version_writes_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Head, "from_here", lambda self, command: ("printf", "%s\n", f"1 {text}"))
    with pytest.raises(CpuftError, match=r"^the events of run \w+ cannot be read \(.*use the cpuft that its host has$"):
        Detached(make_head(), ORDER, "/home/runs/x").show()


@pytest.mark.parametrize(
    "event, what",
    [
        (
            Event("lost"),
            "was killed on node1, or the host was started again: continue it with cpuft launch --resume ",
        ),
        (
            None,
            "does not answer. If only this machine's network is down, the run goes on. If the host is lost, nobody ",
        ),
    ],
)
def test_a_lost_launcher_is_no_end(event: Event | None, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"1 {json.dumps(asdict(event))}\n" if event else ""
    monkeypatch.setattr(Head, "from_here", lambda self, command: ("printf", "%s", text))
    monkeypatch.setattr(detached, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(detached, "_LOST_SECONDS", 0.1)
    with pytest.raises(detached.HeadLostError) as caught:
        Detached(make_head(), ORDER, "/home/runs/x").show()
    assert what in str(caught.value)
    assert str(caught.value).endswith("cpuft launch --resume /home/runs/x --cluster=lab")
    assert caught.value.exit_code == 75


@pytest.mark.parametrize(
    "now, fails, sent, where",
    [
        (FOUND, 0, 1, "here"),
        (replace(FOUND, fetched="m:/x"), 0, 0, "m:/x"),
        (replace(FOUND, has_results=False), 0, 0, ""),
        (FOUND, 2, 3, "here"),
    ],
    ids=["first", "fetched by another", "nothing", "connection breaks"],
)
def test_results_are_fetched_once(
    now: Description, fails: int, sent: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, asked = list[str](), list[tuple[str, ...]]()

    def fetch(run_dir: Path, command: Sequence[str], refuses_earlier: bool) -> list[str]:
        assert refuses_earlier
        calls.append(str(run_dir))
        with pytest.raises(CpuftError, match="another cpuft launch"), lock_run(str(run_dir)):
            pass
        if len(calls) <= fails:
            raise CpuftError("the connection broke")
        return []

    monkeypatch.setattr("cpuft.launch.results.fetch", fetch)
    monkeypatch.setattr(Head, "list_runs", lambda self: [now])
    monkeypatch.setattr(Head, "ask", lambda self, *words: asked.append(words))
    monkeypatch.setattr(detached, "_FETCH_PAUSES", (0.01, 0.01, 0.01))
    assert Detached(make_head(), ORDER, "here").fetch(lambda line: None) == where
    assert calls == ["here"] * sent
    assert [words[0] for words in asked] == ["fetched"] * (where == "here")


@pytest.mark.parametrize("phase, is_fetched", [("finished", True), ("training", False)])
def test_results_are_fetched_although_the_keeper_was_killed_at_the_end(
    phase: str, is_fetched: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def show(self: Detached) -> int:
        raise detached.HeadLostError("the command was killed")

    monkeypatch.setattr(find_runs, "find_run", lambda *words: (RUN, replace(FOUND, state="lost", phase=phase)))
    monkeypatch.setattr(Detached, "show", show)
    monkeypatch.setattr(Detached, "fetch", lambda self, say: "/here/x")
    result = CliRunner().invoke(cli, ["attach", "01", "--run-dir", str(tmp_path / "x")])
    assert (not result.exit_code) == ("run: /here/x" in result.output) == is_fetched


def test_the_shell_completes_ids_and_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CPUFT_STATE", str(tmp_path / "state"))
    (tmp_path / "state").mkdir(mode=0o700)
    save_note("/x/a", LaunchNote(id="0123456789ab", run_dir=f"{tmp_path}/runs/a"), os.environ)
    complete = ShellComplete(cli, {}, "cpuft", "_CPUFT_COMPLETE")
    for begin, offered in (("01", "0123456789ab"), ("ru", "runs/a")):
        assert [item.value for item in complete.get_completions(["attach"], begin)] == [offered]


def test_mpirun_on_the_head_host_does_not_see_the_secrets_of_the_moved_command() -> None:
    """It hands its environment to the first process that claims to be its proxy."""
    cluster, environ = replace(make_cluster((1, 1)), works_remotely=True, uid=1000), {"HF_TOKEN": "x"}
    assert plan_secrets(cluster, "/work", environ)[1] == ("env", "-u", "HF_TOKEN")
    elsewhere = replace(cluster, command_prefixes={"node1": ("ssh", "node1"), "node2": ("ssh", "node2")})
    assert plan_secrets(elsewhere, "/work", environ)[1] == ()


def test_a_cluster_is_active_while_a_run_of_its_own_is(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = [replace(ORDER, id="1", cluster="lab"), replace(ORDER, id="2", cluster="other")]
    orders += [replace(ORDER, id="3", cluster="hosts"), replace(ORDER, id="4", arguments=("launch", "--cluster=lab"))]
    found = [Description(order, "running", "", 1.0) for order in orders]
    ended = replace(ORDER, cluster="lab")
    found += [Description(replace(ended, id=state), state, "", 1.0) for state in ("ended", "lost")]
    found += [Description(replace(ended, id=f"{state} whole"), state, "", 1.0, 0, True) for state in ("ended", "lost")]
    monkeypatch.setattr(find_runs, "list_heads", lambda config: [make_head()])
    monkeypatch.setattr(Head, "list_runs", lambda self: found)
    assert find_runs.list_needed("lab") == (["1", "3", "4"], ["ended whole", "lost whole"])


OTHER_DESCRIPTIONS = [
    '{"id": 1}',
    json.dumps(asdict(FOUND) | {"place": "moon"}),
    *(json.dumps(asdict(replace(FOUND, seconds=value))) for value in (math.nan, math.inf, -1e20)),
    json.dumps(asdict(replace(FOUND, code=10**300))),
    json.dumps(asdict(FOUND))[:-9],
    '{"order": ' + "[" * 10**5,
]


@pytest.mark.parametrize("text", OTHER_DESCRIPTIONS)
def test_a_host_that_describes_its_runs_otherwise_is_named(text: str) -> None:
    with pytest.raises(CpuftError, match=r"host node1 describes its detached runs in another form .*same version"):
        make_head(Answer(0, f"{text}\n")).list_runs()


def test_a_host_that_prints_more_than_its_runs_is_understood() -> None:
    assert make_head(Answer(0, f"hello\n{json.dumps(asdict(FOUND))}\n")).list_runs() == [FOUND]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    with (
        own_root(tmp_path_factory.mktemp("away")) as image,
        simulate(image.parent, "--nodes", "3", "--image", str(image)) as made,
    ):
        lines = [f"The {word} boat sails past the {word} island in the morning.\n" for word in ("red", "old", "long")]
        (made.folder / "book.txt").write_text("".join(lines) * 60)
        save_tiny(made.folder / "tiny")
        yield made


def start(cluster: Simulated, folder: str, *words: str) -> str:
    """Start a detached run, and return its id."""
    done = cluster.cpuft("launch", "--detach", "--cluster", cluster.name, "--run-dir", folder, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().removeprefix("detached: ")


@needs_root
def test_a_run_goes_on_without_its_launcher_and_is_attached_to_from_elsewhere(
    cluster: Simulated, tmp_path: Path
) -> None:
    words = ("launch", "--detach", "--cluster", cluster.name, *TEXTS, *QUIET, *STEPS, "--run-dir", "away")
    environ = {**os.environ, "CPUFT_STATE": str(cluster.folder / "state")}
    command = [sys.executable, "-m", "cpuft", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=cluster.folder, env=environ, stdout=pipe, text=True, start_new_session=True
    ) as one:
        assert one.stdout
        run = one.stdout.readline().strip().removeprefix("detached: ")
        os.killpg(one.pid, signal.SIGKILL)
    # Another machine, which has the cluster's key and its hostfile, and knows nothing of the run.
    home, place = tmp_path / "home", tmp_path / "place"
    place.mkdir()
    home.mkdir()
    config = (cluster.folder / "state" / cluster.name / "ssh_config").read_text()
    (place / "config").write_text(config)
    shutil.copy(cluster.folder / "hostfiles" / cluster.name, place / "hosts")
    there = environ | {"HOME": str(home), "CPUFT_STATE": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path)}
    attach = [sys.executable, "-m", "cpuft", "attach", run[:6], "--hostfile", "hosts", "--ssh-config", "config"]
    done = subprocess.run(attach, cwd=place, env=there, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"\nrun: {place}/runs/away\n")
    record = read_record(str(place / "runs" / "away"))
    assert [record.header.options[name] for name in ("seed", "max_length", "fast_path")] == [7, 32, False]
    assert len({rank.host for rank in record.header.ranks}) == 2
    shown = re.findall(r"^step (\d)/6  loss ([0-9.]+)", done.stderr, re.MULTILINE)
    assert shown == [(str(line.step), f"{line.loss:.4f}") for line in record.steps]
    assert done.stdout.startswith("perplexity "), done.stdout
    # The results are where they were fetched to, and nowhere else.
    again = cluster.cpuft("attach", "away")
    assert again.returncode == 0, again.stderr
    assert again.stdout.endswith(f":{place}/runs/away\n")
    assert "step 6/6" in again.stderr
    assert not (cluster.folder / "away" / "record.jsonl").exists()
    assert "/away/" not in cluster.on(1, "find /var/tmp/cpuft-0")
    listed = cluster.cpuft("runs", "--cluster", cluster.name)
    assert re.search(rf"{run} +launch +away .* ended, exit code 0 +\S+:{place}/runs/away\n", listed.stdout), listed


@pytest.mark.proof
@needs_root
def test_a_mac_starts_shows_stops_and_fetches_a_run(cluster: Simulated) -> None:
    mac = imitate("darwin")
    place = ("--cluster", cluster.name)
    planned = cluster.cpuft("launch", "--detach", "--dry-run", *place, *TEXTS, *QUIET, *STEPS, **mac)
    assert (planned.returncode, "start cpuft launch on " in planned.stdout) == (0, True), planned
    begun = cluster.cpuft("launch", "--detach", *place, "--run-dir", "mac", *TEXTS, *QUIET, *STEPS, **mac)
    assert begun.returncode == 0, begun.stderr
    done = cluster.cpuft("attach", "mac", **mac)
    assert (done.returncode, "step 6/6" in done.stderr) == (0, True), done.stderr
    assert len(read_record(str(cluster.folder / "mac")).steps) == 6
    assert "step 6/6" in cluster.cpuft("logs", begun.stdout.split()[-1], **mac).stderr
    assert re.search(r"launch +mac .* ended, exit code 0 +\S+/mac\n", cluster.cpuft("runs", **mac).stdout)
    swept = cluster.cpuft("sweep", "--dry-run", "--seed", "1,2", *place, *TEXTS[2:], *QUIET[:-4], *STEPS, **mac)
    assert swept.returncode == 0, swept.stderr
    there = cluster.cpuft("launch", *place, "--run-dir", "attended", *TEXTS, *QUIET, *STEPS, **mac)
    assert there.returncode == 0, there.stderr
    records = [read_record(str(cluster.folder / name)) for name in ("mac", "attended")]
    assert [step.loss for step in records[0].steps] == [step.loss for step in records[1].steps]
    assert done.stdout.partition("\n")[0] == there.stdout.partition("\n")[0]  # the metric
    run = start(cluster, "stopped", *TEXTS, *QUIET, "--max-steps", "2000")
    wait_for_update(cluster)
    for system in ("win32", "darwin"):
        listed = cluster.cpuft("runs", **imitate(system))
        assert re.search(rf"{run} +launch +stopped .* training ", listed.stdout), listed
        assert "fast path: not used" in cluster.cpuft("logs", run, **imitate(system)).stderr
    assert cluster.cpuft("stop", run, **mac).returncode == 0
    ended = cluster.cpuft("attach", "stopped", **mac)
    assert (ended.returncode, "cpuft launch --resume" in ended.stderr) == (75, True), ended.stderr


@needs_root
def test_a_stopped_run_saves_a_checkpoint_and_is_resumed_from_here(cluster: Simulated) -> None:
    run = start(cluster, "long", *TEXTS, *QUIET, "--batch-size", "2", "--max-steps", "100")
    # A slow link, so that an update takes a fifth of a second and the stop comes in time, however busy this machine is.
    cluster.on(2, "tc qdisc replace dev eth0 root tbf rate 8mbit burst 64kb latency 50ms")
    down = cluster.cpuft("provision", "down", cluster.name)
    assert (down.returncode, run in down.stderr) == (2, True), down.stderr
    wait_for_update(cluster)
    assert cluster.cpuft("stop", run).returncode == 0
    cluster.on(2, "tc qdisc delete dev eth0 root")
    ended = cluster.cpuft("attach", "long")
    assert ended.returncode == 75, ended.stderr
    folder = cluster.folder / "long"
    line, *_ = re.findall(rf"continue with (cpuft launch --resume {folder})\n", ended.stderr)
    made = len(read_record(str(folder)).steps)
    assert 0 < made < 100
    refused = cluster.cpuft("stop", run)
    assert (refused.returncode, "does not run any more" in refused.stderr) == (2, True)
    resumed = cluster.cpuft(*line.split()[1:], "--no-check")
    assert resumed.returncode == 0, resumed.stderr
    assert len(read_record(str(folder)).steps) == 100


SHORT = ("--task", "demo", "--max-train-samples", "32", "--max-steps", "2", "--precision", "fp32")


@needs_root
def test_a_run_that_is_resumed_here_leaves_nothing_on_its_old_head_host(cluster: Simulated) -> None:
    (cluster.folder / "waits.py").write_text(WAITS)
    script = ("--independent", "--no-check", "--", "waits.py")
    run = start(cluster, "old", "--np", "2", *script)
    wait_until(lambda: [*find_disk(cluster).rglob("begun")])
    local = ("provision", "local", "--name", cluster.name)
    assert cluster.cpuft(*local, "kill", "1").returncode == 0
    made = ("--nodes", "3", "--image", str(cluster.folder / "image"))
    assert cluster.cpuft(*local, *made).returncode == 0
    assert cluster.on(1, f"ls /var/tmp/cpuft-0/detached/{run}/run") == "old"
    resumed = cluster.cpuft("launch", "--resume", "old", *script)
    assert resumed.returncode == 0, resumed.stderr
    assert (cluster.folder / "old" / "resumed").exists()
    assert cluster.on(1, f"cd /var/tmp/cpuft-0 && ls -d {run} *.sent detached/{run}/run 2>/dev/null || true") == ""


@pytest.mark.proof
@needs_root
def test_a_detached_comparison_and_a_detached_sweep_bring_their_reports(cluster: Simulated) -> None:
    found = []
    for verb, words in (("compare", ("--np", "1,2")), ("sweep", ("--seed", "1..4"))):
        options = ("--cluster", cluster.name, "--run-dir", verb, *words, *SHORT, *QUIET[:-4])
        begun = cluster.cpuft(verb, "--detach", *options)
        assert begun.returncode == 0, begun.stderr
        done = cluster.cpuft("attach", verb)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(f"run: {cluster.folder / verb}\n")
        found.append((begun.stderr, done.stdout))
    assert len(list((cluster.folder / "compare").glob("np-*/record.jsonl"))) == 2
    assert (cluster.folder / "compare" / "report.txt").read_text().splitlines()[0] in found[0][1]
    assert len(list((cluster.folder / "sweep").glob("*/record.jsonl"))) == 4
    assert f"cpuft: the sweep is moved to {cluster.hosts[0].name} and ends with that host" in found[1][0]
    assert "ended" in cluster.cpuft("runs").stdout


@pytest.mark.proof
@needs_root
def test_a_lost_head_host_is_told_with_the_command_that_resumes(cluster: Simulated) -> None:
    run = start(cluster, "lost", *TEXTS, *QUIET, "--max-steps", "800", "--checkpoint-every", "1")
    wait_for_step(cluster, run, 10)
    cluster.cpuft("provision", "local", "--name", cluster.name, "kill", "1")
    lost = cluster.cpuft("attach", run)
    resume = f"cpuft launch --resume {cluster.folder / 'lost'}"
    assert lost.returncode == 75
    assert resume in lost.stderr, lost.stderr
    listed = cluster.cpuft("runs")
    assert resume in listed.stderr, listed.stderr
    # A host that was not used before gets the files from here.
    resumed = cluster.cpuft(*resume.split()[1:], "--train-file", "book.txt", "--model", "tiny", "--no-check")
    assert resumed.returncode == 0, resumed.stderr
    record = read_record(str(cluster.folder / "lost"))
    assert (len(record.steps), [line.step > 0 for line in record.resumptions]) == (800, [True])


def wait_for_update(cluster: Simulated) -> None:
    """Wait until the only run on the head host has recorded an update; this takes no CPU from its ranks."""
    wait_until(lambda: any('"kind": "step"' in path.read_text() for path in find_disk(cluster).rglob("record.jsonl")))


def find_disk(cluster: Simulated) -> Path:
    """The folder that has what the head host has written to /var/tmp."""
    return cluster.folder / "state" / cluster.name / "nodes" / "1" / "upper" / "var" / "tmp"


def wait_for_step(cluster: Simulated, run: str, step: int = 2) -> None:
    """Wait until a detached run has made some updates."""
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        steps = re.findall(r"^step (\d+)/", cluster.cpuft("logs", run).stderr, re.MULTILINE)  # not all are shown
        if max(map(int, steps), default=0) >= step:
            return
        time.sleep(0.5)
    raise AssertionError(f"no step {step} of {run}")
