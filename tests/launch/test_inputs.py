"""What hosts get from this machine: files, and variables that may be secret."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpuft import transfer
from cpuft.argv import module_command
from cpuft.cli import cli
from cpuft.config.fields import parse_arguments
from cpuft.config.launch import LaunchConfig, ScriptConfig
from cpuft.config.predict import PredictConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, TransientError
from cpuft.execute import Answer, run_stage
from cpuft.hosts import cluster as clusters
from cpuft.hosts.cluster import Access, Cluster
from cpuft.hosts.hostfile import Host
from cpuft.hosts.mpi_implementations import MpiImplementation
from cpuft.hosts.rank_counts import Assignment
from cpuft.hosts.registry import NO_CLUSTER
from cpuft.hosts.transport import SshTransport
from cpuft.launch import inputs, secret_files
from cpuft.launch.inputs import (
    LaunchNote,
    list_detached,
    list_input_paths,
    load_note,
    make_bundle,
    make_note,
    pack_embedding,
    pack_files,
    pack_script,
    plan_sending,
    save_note,
)
from cpuft.launch.mpirun import KEY
from cpuft.launch.plan import Job, add_transfers
from cpuft.launch.results import plan_results
from cpuft.launch.resume import ResumedRun
from cpuft.launch.run import LaunchRequest, plan_request
from cpuft.launch.run_state import LaterStartError, read_state
from cpuft.launch.secret_files import secrets_on_hosts
from cpuft.plans import Plan, RunPlan, Step
from cpuft.transfer import FILE, FROM_STREAM, connect, send, walk
from tests.conftest import make_facts
from tests.records import make_state

LONG = "a" * 300
"""A text that is not a path."""
AWAY = Cluster(
    (Assignment(Host("a"), 1), Assignment(Host("b"), 1), Assignment(Host("c"), 1)),
    (),
    MpiImplementation("mpirun", "intel"),
    access=Access(
        SshTransport("there.conf"),
        replace(NO_CLUSTER, python="/opt/cpuft/env/bin/python", ssh_config_there="/opt/config"),
    ),
    works_remotely=True,
    command_prefixes={name: ("ssh", name) for name in "abc"},
)
SHARED = replace(AWAY, access=Access(entry=replace(NO_CLUSTER, shares_files=True)))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The working directory: a script with its modules, and inputs below it."""
    files = ("code/train.py", "code/other.py", "code/pack/__init__.py", "code/pack/a.py", "code/notes.txt")
    for name in (*files, "rows.csv", "model/config.json", "code/pack/__pycache__/a.pyc"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def names_of(bundle: inputs.Bundle) -> list[str]:
    return [one.name for source in bundle.sources for one in walk(str(source), source.name) if one.kind == FILE]


def test_nothing_is_sent_to_hosts_that_share_files(work: Path) -> None:
    command = (sys.executable, str(work / "code/train.py"), "rows.csv")
    assert pack_script(SHARED, command) == (command, ())
    assert pack_script(replace(AWAY, works_remotely=False), command) == (command, ())
    train = TrainConfig(model="model")
    assert pack_files(SHARED, train) == (train, ())


def test_embeddings_need_the_model_on_all_hosts_and_the_files_on_the_head_host(work: Path) -> None:
    (work / "more.csv").write_text("text")
    request = PredictConfig(run="run", file="*.csv,hub:a/b", output="x.npy")
    assert pack_embedding(SHARED, request) == (replace(request, run="", model="run/model"), ())
    sent, (more, rows) = pack_embedding(AWAY, request)
    assert sent.file == f"{more.remote_folder}/more.csv,{rows.remote_folder}/rows.csv,hub:a/b"
    assert (sent.run, sent.model, more.is_for_head, rows.is_for_head) == ("", "run/model", True, True)
    (work / "model").rename(work / "run")
    (work / "run" / "model").mkdir()
    (work / "run" / "model" / "config.json").write_text("{}")
    sent, (more, rows, model) = pack_embedding(AWAY, request)
    assert (sent.model, model.is_for_head) == (f"{model.remote_folder}/model", False)
    folders = {more.remote_folder, rows.remote_folder, model.remote_folder}
    missing = dict.fromkeys("abc", folders)
    steps = plan_sending((more, rows, model), missing, AWAY)
    assert [[step.why.split(" (")[0] for step in stage] for stage in steps] == [
        ["send more.csv to a"],
        ["send rows.csv to a"],
        ["send model to a", "send model to b", "send model to c"],
    ]
    assert pack_embedding(AWAY, replace(request, run="", model="minilm", file="none"))[1] == ()


def test_modules_and_packages_beside_a_script_are_sent(work: Path) -> None:
    command, (bundle,) = pack_script(AWAY, (sys.executable, str(work / "code/train.py"), "--lr", "1e-4"))
    assert command == (AWAY.python, f"{bundle.remote_folder}/train.py", "--lr", "1e-4")
    assert names_of(bundle) == ["other.py", "pack/__init__.py", "pack/a.py", "train.py"]
    assert bundle.remote_folder.startswith(f"{AWAY.inputs}/")


def test_modules_beside_the_target_of_a_link_to_a_script_are_sent(work: Path) -> None:
    (work / "link.py").symlink_to("code/train.py")
    command, (bundle,) = pack_script(AWAY, (sys.executable, str(work / "link.py")))
    assert command == (AWAY.python, f"{bundle.remote_folder}/train.py")
    assert "other.py" in names_of(bundle)


def test_files_and_folders_that_arguments_name_are_sent(work: Path) -> None:
    words = ("rows.csv", "--model=model", "--out=missing", "--flag", ".", "--in=.", "..", "", "a 0", "$HOME", "-", LONG)
    command, bundles = pack_script(AWAY, (sys.executable, str(work / "code/train.py"), *words))
    _, rows, model = bundles
    expected = (f"{rows.remote_folder}/rows.csv", f"--model={model.remote_folder}/model", *words[2:])
    assert command[2:] == expected
    assert names_of(model) == ["model/config.json"]


def test_devices_and_pipes_that_arguments_name_are_not_sent(work: Path) -> None:
    os.mkfifo(work / "pipe")
    words = ("--log", "/dev/null", "--out=/dev/zero", "pipe")
    command, bundles = pack_script(AWAY, (sys.executable, str(work / "code/train.py"), *words))
    assert (command[2:], len(bundles)) == (words, 1)


def test_a_program_is_sent_if_it_is_a_path_and_looked_up_on_the_host_if_it_is_a_name(work: Path) -> None:
    (work / "hostname").write_text("not the program of that name")
    assert pack_script(AWAY, ("hostname", "-f")) == (("hostname", "-f"), ())
    command, (bundle,) = pack_script(AWAY, (str(work / "code/train.py"),))
    assert command == (f"{bundle.remote_folder}/train.py",)
    assert names_of(bundle) == ["train.py"]


def test_the_inputs_of_a_training_are_sent(work: Path) -> None:
    train = TrainConfig(task="files", model="model", train_file="rows.csv", validation_file="rows.csv")
    changed, bundles = pack_files(AWAY, train)
    assert changed.model == f"{bundles[0].remote_folder}/model"
    assert changed.train_file == changed.validation_file == f"{bundles[1].remote_folder}/rows.csv"
    assert changed.data_dir == ""
    assert pack_files(AWAY, TrainConfig())[1] == ()


def test_each_of_several_files_is_sent(work: Path) -> None:
    train = TrainConfig(task="text", train_file="rows.csv,code/notes.txt,missing", model="model")
    changed, bundles = pack_files(AWAY, train)
    model, rows, notes = (bundle.remote_folder for bundle in bundles)
    assert changed.train_file == f"{rows}/rows.csv,{notes}/notes.txt,missing"
    assert (changed.model, changed.validation_file) == (f"{model}/model", "")


@pytest.mark.parametrize("option", ["model", "from_config", "tokenizer", "data_dir", "train_file", "validation_file"])
def test_a_record_sends_no_file_that_the_user_did_not_name(work: Path, option: str) -> None:
    """A host that writes a path of this machine into the record of a run gets nothing by --resume."""
    options: dict[str, Any] = {option: str(work / "rows.csv")}
    train = TrainConfig(task="files", **options)
    told = f"the run's record says --{option.replace('_', '-')} {work}/rows.csv, which was not named for this run"
    with pytest.raises(CpuftError, match=re.escape(told)):
        pack_files(AWAY, train, allowed=set())
    for named in (None, list_input_paths(train), list_input_paths(train, {option: "command line"})):
        assert len(pack_files(AWAY, train, allowed=named)[1]) == 1
    assert list_input_paths(train, {"task"}) == set()


def test_files_sent_before_and_hub_names_need_no_permission(work: Path) -> None:
    sent = f"{AWAY.inputs}/0123/rows.csv"
    changed, bundles = pack_files(AWAY, TrainConfig(task="files", train_file=sent, model="some/name"), allowed=set())
    assert (changed.train_file, [bundle.sources for bundle in bundles]) == (sent, [()])


def test_paths_that_the_user_named_are_noted_on_this_machine_until_the_run_has_ended(work: Path) -> None:
    environ = {"CPUFT_STATE": str(work / "state")}
    train = TrainConfig(task="text", train_file="rows.csv,missing", model="model")
    note = LaunchNote(tuple(sorted(list_input_paths(train))), cluster="lab")
    assert load_note("/runs/run", environ) == LaunchNote()
    save_note("/runs/run", note, environ)
    assert load_note("/runs/run", environ) == note
    assert note.paths == (str(work / "model"), str(work / "rows.csv"))
    assert load_note("/runs/other", environ) == LaunchNote()
    (kept,) = (work / "state").rglob("*.json")
    kept.write_text("{")
    assert load_note("/runs/run", environ) == LaunchNote()
    save_note("/runs/run", LaunchNote(), environ)
    assert not kept.exists()
    save_note("/runs/run", note, {"CPUFT_STATE": str(work / "rows.csv")})  # no folder, no harm


def test_a_note_that_is_removed_meanwhile_hides_no_others(work: Path) -> None:
    environ = {"CPUFT_STATE": str(work / "state")}
    for name in ("first", "second"):
        save_note(f"/runs/{name}", LaunchNote(id=name, run_dir=f"/runs/{name}"), environ)
    (note, _) = (work / "state").rglob("*.json")
    note.with_name("removed.json").symlink_to(work / "nowhere")
    assert [note.id for note in list_detached(environ)] == ["first", "second"]


def test_a_note_has_absolute_paths(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", "/home/me")
    note = make_note(LaunchConfig(hostfile="hosts", ssh_config="~/lab"), ["/b", "/a"])
    assert note == LaunchNote(("/a", "/b"), "", f"{work}/hosts", "/home/me/lab")


HOSTS = ("cluster", "hostfile", "ssh_config")


@pytest.mark.parametrize(
    "noted, given, used",
    [
        ({"cluster": "lab"}, {}, ("lab", "", "")),
        ({"hostfile": "/h", "ssh_config": "/s"}, {}, ("", "/h", "/s")),
        ({"hostfile": "/h", "ssh_config": "/s"}, {"ssh_config": "/other"}, ("", "/h", "/other")),
        ({"cluster": "lab"}, {"hostfile": "/h"}, ("", "/h", "")),
        ({"cluster": "lab"}, {"cluster": ""}, ("", "", "")),
        ({"ssh_config": "/s"}, {}, ("", "", "")),
    ],
)
def test_a_run_is_resumed_on_the_cluster_where_it_was_started(
    noted: dict[str, str], given: dict[str, str], used: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user names other hosts."""
    environ, run, said, configs = (
        {"CPUFT_STATE": str(tmp_path / "state")},
        tmp_path / "run",
        list[str](),
        list[LaunchConfig](),
    )

    def gather(run: str, config: LaunchConfig, is_script: bool) -> None:
        configs.append(config)
        raise CpuftError("that is enough")

    monkeypatch.setattr("cpuft.launch.run.gather_resumed_run", gather)
    save_note(str(run), LaunchNote((), **noted), environ)
    config = parse_arguments(LaunchConfig, [f"--{name.replace('_', '-')}={value}" for name, value in given.items()])
    request = LaunchRequest(config, TrainConfig(), ScriptConfig(), (), str(run), frozenset(given), "lines")
    with ExitStack() as sessions, pytest.raises(CpuftError, match="that is enough"):
        plan_request(request, environ, said.append, None, sessions)
    assert tuple(getattr(configs[0], name) for name in HOSTS) == used
    again = any(noted.get(name) == value != "" for name, value in zip(HOSTS[:2], used))
    where = "--cluster lab" if "cluster" in noted else "--hostfile /h"
    assert said == [f"cpuft: the run was started with {where}, which is used again"] * again


@pytest.mark.parametrize("asked", [(), ("--train-file", "rows.csv")])
def test_resume_may_send_paths_that_the_user_names_now_or_named_at_the_start(
    work: Path, asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the launch up to its plan."""
    monkeypatch.setenv("CPUFT_STATE", str(work / "state"))
    resumed = ResumedRun(str(work / "run"), TrainConfig(task="files", train_file="rows.csv", model="model"), 1)
    jobs = list[Job]()

    def plan_run(job: Job, *others: object) -> None:
        jobs.append(job)
        raise CpuftError("that is enough")

    monkeypatch.setattr("cpuft.launch.run.gather_resumed_run", lambda *given: resumed)
    monkeypatch.setattr("cpuft.launch.run.gather_cluster", lambda *given: AWAY)
    monkeypatch.setattr("cpuft.launch.run.plan_run", plan_run)
    for remembered in (set(), {str(work / "model")}):
        save_note(resumed.run_dir, LaunchNote(tuple(remembered)), os.environ)
        with pytest.raises(CpuftError, match="that is enough"):
            cli.main(["launch", "--resume", "run", *asked], standalone_mode=False)
        assert jobs[-1].allowed_paths == frozenset({*remembered, *([str(work / "rows.csv")] if asked else [])})
        assert jobs[-1].train.train_file == "rows.csv"
    monkeypatch.delenv("CPUFT_STATE")


@pytest.mark.parametrize(
    "change",
    [
        lambda work: (work / "code/pack/a.py").write_text("another text"),
        lambda work: (work / "code/pack/a.py").rename(work / "code/pack/b.py"),
        lambda work: (work / "code/train.py").chmod(0o755),
        lambda work: (work / "code/pack/new.py").write_text(""),
    ],
)
def test_changed_files_get_another_remote_folder(work: Path, change: object) -> None:
    sources = (work / "code/pack", work / "code/train.py")
    before = make_bundle(sources, AWAY.inputs)
    assert make_bundle(sources, AWAY.inputs) == before
    assert callable(change)
    change(work)
    assert make_bundle(sources, AWAY.inputs).remote_folder != before.remote_folder


def test_a_bundle_is_sent_and_unpacked_as_planned(work: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Links are sent as their targets, compiled files are left out, and sending again changes nothing."""
    (work / "code/pack/weights").symlink_to(work / "rows.csv")
    bundle = make_bundle((work / "code/pack", work / "code/train.py"), "/inputs")
    folder = tmp_path_factory.mktemp("there") / "mine"
    there = folder / bundle.remote_folder[1:]
    bundle = replace(bundle, remote_folder=str(there))
    ((step,),) = plan_sending((bundle,), {"a": {str(there)}, "b": set()}, AWAY)
    sent = ("code/pack/__init__.py", "code/pack/a.py", "code/pack/weights", "code/train.py")
    assert bundle.nbytes == sum((work / name).stat().st_size for name in sent)
    ((big,),) = plan_sending((replace(bundle, nbytes=12_345_678),), {"a": {str(there)}}, AWAY)
    assert big.why == f"send {work}/code/pack to a (12.3 MB)".replace(f"{work}/code/", "")
    step = replace(step, command=(*step.command[: step.command.index("ssh")], "sh", "-c", step.command[-1]))
    step = replace(step, command=tuple(word.replace(AWAY.folder, str(folder)) for word in step.command))
    for _ in range(2):
        (answer,) = run_stage(Plan(), (step,), 30)
        assert (answer.exit_code, answer.output) == (0, "")
    found = sorted(str(path.relative_to(there)) for path in there.rglob("*") if path.is_file())
    assert found == ["pack/__init__.py", "pack/a.py", "pack/weights", "train.py"]
    assert not (there / "pack/weights").is_symlink()
    assert sorted(path.name for path in there.parent.iterdir()) == [there.name, f"{there.name}.files"]


def test_what_is_behind_links_counts_like_what_is_in_the_folder(work: Path) -> None:
    """Two folders that each hold a link to a folder are different data, and an edit behind a link is sent."""
    (work / "far/deep").mkdir(parents=True)
    (work / "far/deep/rows.csv").write_text("1")
    (work / "near").mkdir()
    (work / "near/rows.csv").write_text("2")
    folders = []
    for target in ("far/deep", "near"):
        folder = work / "links" / target.replace("/", "-") / "data"
        folder.mkdir(parents=True)
        (folder / "split").symlink_to(work / target)
        folders.append(make_bundle((folder,), AWAY.inputs).remote_folder)
    assert len({*folders}) == 2
    bundle = make_bundle((work / "links/near/data",), AWAY.inputs)
    assert (names_of(bundle), bundle.nbytes) == (["data/split/rows.csv"], 1)
    (work / "near/rows.csv").write_text("3")
    assert make_bundle((work / "links/near/data",), AWAY.inputs).remote_folder != bundle.remote_folder
    before = make_bundle((work / "code",), AWAY.inputs)
    (work / "code/empty").mkdir()
    assert make_bundle((work / "code",), AWAY.inputs).remote_folder != before.remote_folder


def test_the_walk_follows_links_and_leaves_out_what_cannot_be_sent(work: Path) -> None:
    (work / "code/more").symlink_to(work / "model")
    (work / "code/again").symlink_to(work / "model")
    (work / "code/pack/compiled").symlink_to(work / "code/pack/__pycache__")
    (work / "code/empty").mkdir()
    os.mkfifo(work / "code/pipe")
    assert names_of(make_bundle((work / "code",), AWAY.inputs)) == [
        *(
            "code/again/config.json",
            "code/more/config.json",
            "code/notes.txt",
            "code/other.py",
            "code/pack/__init__.py",
        ),
        *("code/pack/a.py", "code/pack/compiled/a.pyc", "code/train.py"),
    ]
    assert "code/empty" in [one.name for one in walk(f"{work}/code", "code")]


def test_links_that_cannot_be_followed_are_named(work: Path) -> None:
    (work / "model/loop").symlink_to(work)
    (work / "code/.#train.py").symlink_to("user@host.1:2")  # Emacs' mark of a file that is edited
    assert ".#train.py" not in names_of(pack_script(AWAY, (sys.executable, str(work / "code/train.py")))[1][0])
    with pytest.raises(CpuftError, match=r"\.#train\.py is a link to user@host\.1:2, which does not exist"):
        make_bundle((work / "code",), AWAY.inputs)
    (work / "code/.#train.py").unlink()
    with pytest.raises(CpuftError, match=r"is a link to .*, a folder that contains the link: remove the link"):
        make_bundle((work / "model",), AWAY.inputs)


def run_transfer(*words: object) -> str:
    """Run the program for hosts here; return what it printed."""
    command = (sys.executable, transfer.__file__, *map(str, words))
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def stored(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a bundle on a host, which has received `code/pack` and `rows.csv`."""
    bundle = make_bundle((work / "code/pack", work / "rows.csv"), str(tmp_path_factory.mktemp("there") / "mine/inputs"))
    receive(work, Path(bundle.remote_folder))
    return Path(bundle.remote_folder)


def receive(work: Path, there: Path) -> None:
    words = (sys.executable, "-IS", "-c", FROM_STREAM, "receive", *map(str, (there.parents[1], there, there.name)))
    with connect(words) as stream:
        send(stream, [*walk(f"{work}/code/pack", "pack"), *walk(f"{work}/rows.csv", "rows.csv")])


def test_a_bundle_that_lacks_a_file_is_sent_again(work: Path, stored: Path) -> None:
    """systemd-tmpfiles removes single files from /var/tmp. What runs have added since is no reason to send again."""

    def find_missing() -> str:
        return run_transfer("find-missing", stored.parents[1], stored).strip()

    (stored / "pack/__pycache__").mkdir()
    (stored / "pack/__pycache__/b.pyc").write_text("compiled there")
    (stored / "log").write_text("written by a run")
    assert find_missing() == ""
    kept = (stored / "rows.csv").stat()
    for damage in (
        lambda: (stored / "pack/a.py").unlink(),
        lambda: (stored / "rows.csv").write_text("cut"),
        lambda: stored.with_name(f"{stored.name}.files").unlink(),
    ):
        damage()
        assert find_missing() == str(stored)
        receive(work, stored)
        assert find_missing() == ""
        found = ((stored / "pack/a.py").read_text(), (stored / "rows.csv").stat().st_size)
        assert found == ("code/pack/a.py", kept.st_size)
    assert (stored / "log").exists()
    assert sorted(path.name for path in stored.parent.iterdir()) == [stored.name, f"{stored.name}.files"]


def test_old_bundles_are_removed_from_hosts_unless_a_process_uses_them(work: Path, stored: Path) -> None:
    """Only folders whose names cpuft gives are removed; the times of those in use are refreshed."""
    month = 31 * 86400
    names = ("a" * 24, "b" * 24, "c" * 24, f"{'a' * 24}.x1y2z3", f"{'a' * 24}.partial", "notes", "d" * 23)
    for name in names:
        (stored.parent / name / "inside").mkdir(parents=True)
        os.utime(stored.parent / name, (time.time() - month,) * 2)
    (stored.parent / f"{'a' * 24}.files").write_text("")
    os.utime(stored.parent / ("c" * 24), (time.time() - month / 2,) * 2)
    for path in (stored, *stored.rglob("*")):
        os.utime(path, (time.time() - month,) * 2)
    script = ("sh", "-c", "read line", str(stored.parent / ("b" * 24) / "train.py"))
    with subprocess.Popen(script, stdin=subprocess.PIPE) as user:
        run_transfer("keep-bundles", stored.parent, stored)
        user.communicate(b"\n")
    left = {path.name for path in stored.parent.iterdir()} - {stored.name, f"{stored.name}.files"}
    assert left == {"b" * 24, "c" * 24, "notes", "d" * 23}
    files = [path for path in stored.rglob("*") if path.is_file()]
    assert all(time.time() - path.stat().st_atime < 60 for path in files)
    # Python compiles a module again if its time has changed.
    assert all(time.time() - path.stat().st_mtime > month - 60 for path in files)
    run_transfer("keep-bundles", stored.parent / "missing")


def test_a_launch_tells_its_hosts_which_bundles_it_uses(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[str, tuple[str, ...]]]()

    def run(self: SshTransport, host: Host, command: Sequence[str], stdin: str = "", seconds: float = 0) -> Answer:
        asked.append((host.name, tuple(command[7:])))
        return Answer(1, "", "")

    monkeypatch.setattr(SshTransport, "run", run)
    command, (bundle,) = pack_script(AWAY, (sys.executable, str(work / "code/train.py")))
    plan = RunPlan(ranks=((Step("ranks", ("mpirun", *command)),),))
    for cluster in (AWAY, SHARED):
        inputs.keep_bundles(plan, cluster)
    assert sorted(asked) == [(name, ("keep-bundles", AWAY.inputs, bundle.remote_folder)) for name in "abc"]


def test_a_run_is_fetched_completely_or_not_at_all(tmp_path: Path) -> None:
    work, run = tmp_path / "there" / "run", tmp_path / "runs" / "run"
    (fetch,), clean = plan_results(replace(AWAY, command_prefixes={}), str(work), str(run))
    work.parent.mkdir()
    assert run_stage(Plan(), (fetch,), 30)[0].exit_code == 0
    assert list(run.parent.iterdir()) == []
    (work / "logs").mkdir(parents=True)
    (work / "record.jsonl").write_text("line\n")
    assert run_stage(Plan(), (fetch,), 30)[0].exit_code == 0
    assert (run / "record.jsonl").read_text() == "line\n"
    assert [step.host for step in clean] == ["a", "b", "c"]


def test_prepared_examples_are_copied_to_the_other_hosts() -> None:
    plan = RunPlan(prepare=((Step("prepare", ("prepare",), host="a"),),))
    made = add_transfers(plan, (), {}, AWAY, "/runs/run")
    assert [[step.why for step in stage] for stage in made.prepare] == [
        ["prepare"],
        ["copy the prepared examples to b", "copy the prepared examples to c"],
    ]
    assert {step.host for stage in made.prepare for step in stage} == {"a"}
    assert add_transfers(plan, (), {}, SHARED, "/runs/run").prepare == plan.prepare
    one = replace(AWAY, assignments=AWAY.assignments[:1])
    assert add_transfers(plan, (), {}, one, "/runs/run").prepare == plan.prepare


def make_cluster(hosts: int) -> Cluster:
    """A cluster whose hosts have told their facts."""
    names = [f"n{number}" for number in range(1, hosts + 1)]
    return replace(
        AWAY,
        assignments=tuple(Assignment(Host(name), 1) for name in names),
        facts=tuple(make_facts(number) for number in range(1, hosts + 1)),
        access=replace(AWAY.access, entry=replace(AWAY.access.entry, settings={"PYTHONPATH": "/opt/a b"})),
        command_prefixes={name: ("ssh", name) for name in names},
    )


def test_the_head_host_sends_large_files_on_to_the_others(work: Path) -> None:
    """One copy leaves this machine; small files, and files for two hosts, are sent to each host from here."""
    cluster = make_cluster(4)
    bundle = replace(make_bundle((work / "model",), cluster.inputs), nbytes=20_000_000)
    missing = {f"n{number}": {bundle.remote_folder} for number in range(1, 5)}
    (first,), others = plan_sending((bundle,), missing, cluster)
    assert (first.why, first.host, first.settings) == ("send model to n1 (20.0 MB)", "", ())
    push = module_command(sys.executable, "cpuft.transfer")
    assert first.command[: len(push) + 4] == (*push, "push", str(work), "1", "model")
    assert [(one.why, one.host) for one in others] == [(f"send model to n{n} (20.0 MB)", "n1") for n in (2, 3, 4)]
    push = module_command(cluster.python, "cpuft.transfer")
    assert others[0].command[: len(push) + 4] == (*push, "push", bundle.remote_folder, "1", "model")
    assert [(one.name, one.value) for one in others[0].settings] == [("PYTHONPATH", "/opt/a b")]
    *_, name, line = others[0].command
    checksum = os.path.basename(bundle.remote_folder)
    receive = cluster.access.transfer_command("receive", cluster.folder, bundle.remote_folder, checksum)
    assert (name, shlex.split(line)) == ("n2", ["exec", *receive])
    assert first.command[-2:] == ("n1", line)
    (small,) = plan_sending((replace(bundle, nbytes=10_000_000),), missing, cluster)
    (few,) = plan_sending((bundle,), {name: missing[name] for name in ("n1", "n3")}, cluster)
    # What runs have added to it on the head host since does not go to the others.
    (there,) = plan_sending((bundle,), {name: missing[name] for name in ("n2", "n3", "n4")}, cluster)
    assert [[one.host for one in stage] for stage in (small, few, there)] == [[""] * 4, [""] * 2, [""] * 3]
    assert plan_sending((replace(bundle, is_for_head=True),), missing, cluster) == ((first,),)


def test_small_files_are_sent_to_16_hosts_at_a_time(work: Path) -> None:
    cluster = make_cluster(40)
    bundle = make_bundle((work / "model",), cluster.inputs)
    stages = plan_sending((bundle,), {f"n{number}": {bundle.remote_folder} for number in range(1, 41)}, cluster)
    assert [len(stage) for stage in stages] == [16, 16, 8]


def test_the_head_host_copies_prepared_examples_to_16_hosts_at_a_time() -> None:
    plan, cluster = RunPlan(prepare=((Step("prepare", ("prepare",), host="n1"),),)), make_cluster(20)
    _, *stages = add_transfers(plan, (), {}, cluster, "/runs/run", prepared_hosts=("n3",)).prepare
    assert [len(stage) for stage in stages] == [16, 2]
    step, work = stages[0][0], cluster.work_dir("/runs/run")
    assert (step.why, step.host) == ("copy the prepared examples to n2", "n1")
    push = module_command(cluster.python, "cpuft.transfer")
    assert step.command[: len(push) + 4] == (*push, "push", work, "1", "data.npz")
    assert [(one.name, one.value) for one in step.settings] == [("PYTHONPATH", "/opt/a b")]
    assert step.command[len(push) + 4 :][:3] == ("ssh", "-o", "BatchMode=yes")
    *_, option, config, name, line = step.command
    assert (option, config, name) == ("-F", "/opt/config", "n2")
    assert shlex.split(line) == ["exec", *cluster.access.transfer_command("receive", cluster.folder, work)]


class LocalTransport(SshTransport):
    """Every host is this machine."""

    def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 60.0) -> Answer:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=seconds)
        return Answer(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(clusters, "WORK_ROOT", str(tmp_path))
    assignments = AWAY.assignments[:1]
    return replace(
        AWAY, assignments=assignments, access=replace(AWAY.access, transport=LocalTransport()), uid=os.geteuid()
    )


@contextmanager
def sent(cluster: Cluster, **changes: Any) -> Iterator[Path]:
    """The secret file of a rank during a launch, which begins with this state."""
    work = f"{cluster.folder}/0123456789ab/run"
    with secrets_on_hosts(RunPlan(), cluster, work, {}, make_state(**changes)):
        yield Path(cluster.sent_file(work, 0) + "-0")


def wait_until_gone(path: Path, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return not path.exists()


def age(path: Path, minutes: float) -> None:
    os.utime(path, (time.time() - minutes * 60,) * 2)


def test_secret_files_exist_during_the_run_and_are_removed_after_it(cluster: Cluster) -> None:
    with sent(cluster) as path:
        assert len(json.loads(path.read_text())[KEY]) == 64
        assert path.stat().st_mode & 0o777 == 0o600
        pid = int((path.parent / ".watch").read_text())
        assert Path(f"/proc/{pid}").exists()
    assert list(Path(cluster.folder).iterdir()) == []
    assert wait_until_gone(Path(f"/proc/{pid}"))


def test_a_host_knows_the_last_start_of_a_run_and_refuses_earlier_ones(cluster: Cluster) -> None:
    """Two launchers may command one run, and may have counted to the same number."""
    begun = Path(cluster.folder, "0123456789ab")
    with sent(cluster, owner=9, start="one"):
        with sent(cluster, owner=10, start="two") as path:
            assert read_state(str(begun)) == make_state(owner=10, start="two")
            for changes in ({"owner": 9}, {"owner": 10, "start": "three"}):
                why = r"^host a works for another start of the run \(number 10\): wait until"
                with pytest.raises(LaterStartError, match=why), sent(cluster, **changes):
                    pass
            assert read_state(str(begun)) == make_state(owner=10, start="two")
            assert path.exists()
        assert not begun.exists()
    (begun / "run").mkdir(parents=True)
    with sent(cluster, owner=11) as path:
        pass
    assert (path.parent.exists(), (begun / "state.json").exists()) == (False, True)


def test_hosts_that_share_a_disk_write_the_state_beside_each_other(cluster: Cluster) -> None:
    begun = Path(cluster.folder, "0123456789ab")
    Path(cluster.folder).mkdir(mode=0o700)
    (begun / "state.json.new").mkdir(parents=True)  # as if another host wrote
    with sent(cluster):
        assert read_state(str(begun)) == make_state()


def test_a_host_that_is_silent_while_it_gets_its_files_is_not_asked_again() -> None:
    asked = list[tuple[str, str]]()

    class Transport(LocalTransport):
        def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 60.0) -> Answer:
            asked.append((host.name, argv[4]))
            if host.name == AWAY.assignments[1].host.name:
                raise TransientError("no answer")
            return Answer(0, "")

    cluster = replace(AWAY, access=replace(AWAY.access, transport=Transport()))
    with pytest.raises(TransientError), sent(cluster):
        pass
    first, second = (one.host.name for one in AWAY.assignments[:2])
    assert [action for name, action in asked if name == second] == ["send"]
    assert [action for name, action in asked if name == first] == ["send", "remove"]


def test_a_host_removes_secret_files_that_no_process_read_in_ten_minutes(cluster: Cluster) -> None:
    with sent(cluster) as path:
        age(path, 9)
        time.sleep(2.5)
        assert path.exists()
        age(path, 11)
        assert wait_until_gone(path.parent)
        assert list(Path(cluster.folder).iterdir()) == []


def test_a_host_keeps_the_state_of_a_run_whose_processes_have_read_their_files(cluster: Cluster) -> None:
    with sent(cluster) as path:
        path.unlink()
        assert wait_until_gone(path.parent)
        assert Path(cluster.folder, "0123456789ab", "state.json").exists()


def test_an_active_launcher_keeps_secret_files_from_being_removed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preparing the examples may take longer than ten minutes, and ranks start after that."""
    monkeypatch.setattr(secret_files, "_REFRESH_SECONDS", 0.1)
    with sent(cluster) as path:
        age(path, 9)
        end = time.monotonic() + 10
        while path.stat().st_mtime < time.time() - 60 and time.monotonic() < end:
            time.sleep(0.05)
        assert path.stat().st_mtime > time.time() - 60


def test_the_next_launch_removes_secret_files_of_a_host_that_was_off(cluster: Cluster) -> None:
    """A host that was switched off has no process that removes them."""
    folder = Path(cluster.folder)
    for name in ("old", "new"):
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / f"{name}.sent").mkdir(mode=0o700)
        (folder / f"{name}.sent" / "0-0").write_text("{}")
    (folder / "inputs").mkdir()
    age(folder / "old.sent" / "0-0", 11)
    with sent(cluster) as path:
        names = ["inputs", "new.sent", path.parent.name, "0123456789ab"]
        assert sorted(one.name for one in folder.iterdir()) == sorted(names)
