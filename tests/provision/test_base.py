"""The contract of providers, the table of kinds of clusters, and the loop that gathers, plans and executes."""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from cpuft import execute
from cpuft.cli.provision import make_verb, provision
from cpuft.config.fields import option
from cpuft.errors import CpuftError
from cpuft.files import write_text
from cpuft.hosts.registry import Entry, format_entry
from cpuft.plans import Plan, Step
from cpuft.provision.base import PROVIDERS, Kind, Provider, lock, reconcile, run_plan
from cpuft.provision.cluster_files import plan_file, plan_removal

STEP = Step("make it", ("true",))


def quiet(text: str) -> None:
    """Progress that no test looks at."""


def test_it_ends_when_nothing_is_missing(tmp_path: Path) -> None:
    made = tmp_path / "made"

    def plan(there: bool) -> Plan:
        return Plan() if there else Plan(((Step("make it", ("touch", str(made))),),))

    assert reconcile(made.exists, plan, quiet)


def test_the_same_plan_twice_is_stuck_and_says_on_what() -> None:
    with pytest.raises(CpuftError, match=r"changed nothing \(make it\): see with"):
        reconcile(lambda: 0, lambda facts: Plan(((STEP,),)), quiet)


def test_every_step_that_failed_is_named_with_its_last_words() -> None:
    steps = tuple(Step("install", ("install",), host=host) for host in ("a", "b", "c"))
    says = {"a": "echo first; echo no space left >&2; exit 1", "b": "true", "c": "echo c is off; exit 255"}
    told: list[str] = []
    with pytest.raises(CpuftError) as caught:
        run_plan(
            Plan((steps,), command_prefixes={host: ("sh", "-c", script) for host, script in says.items()}), told.append
        )
    assert str(caught.value) == (
        "a: install: failed (first | no space left); c: install: failed (c is off): "
        "correct the cause and run the same command again"
    )
    assert told == ["install (3 hosts)"]


def test_whoever_waits_is_told_which_hosts_have_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "_REMIND_SECONDS", 0.3)
    steps = tuple(Step("install", ("install",), host=host) for host in ("a", "b", "c"))
    waits = "for _ in $(seq 600); do [ -e told ] && break; sleep 0.1; done"
    says = {"a": waits, "b": "true", "c": waits}
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if "not finished on a, c " in line:
            Path("told").touch()

    run_plan(Plan((steps,), command_prefixes={host: ("sh", "-c", script) for host, script in says.items()}), tell)
    assert told[0] == "install (3 hosts)"
    # On a busy machine b takes a while, too.
    assert {re.sub(r"[0-9]+ s$", "N s", line) for line in told[1:]} >= {"install: not finished on a, c after N s"}


def test_a_program_that_is_not_there_is_said() -> None:
    with pytest.raises(CpuftError, match=r"^make it: failed \(.*no-such-program.*\): correct the cause"):
        run_plan(Plan(((Step("make it", ("no-such-program",)),),)), quiet)


@pytest.mark.parametrize("text", ["a 0", 'a"=0"', "a'; echo foo", "$HOME", "two\nlines\n", "EOF\n"])
def test_a_file_is_written_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "new folder" / "it's here"
    run_plan(Plan(((plan_file(str(path), text, "write"),),)), quiet)
    assert path.read_text() == text
    assert path.stat().st_mode & 0o777 == 0o644


def test_only_one_works_on_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "local"
    entered = threading.Event()

    def second() -> None:
        with lock(path):
            entered.set()

    with lock(path):
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.3)
        with pytest.raises(CpuftError, match=r"changing local for 0 s: wait until it ends"), lock(path, seconds=0.0):
            pass
    thread.join(5)
    assert entered.is_set()
    assert not list(tmp_path.iterdir())


def test_writing_beside_a_file_follows_no_link(tmp_path: Path) -> None:
    path, other = tmp_path / "folder" / "file", tmp_path / "other"
    other.write_text("mine")
    path.parent.mkdir()
    path.with_name("file.new").symlink_to(other)
    run_plan(Plan(((plan_file(str(path), "text", "why"),),)), quiet)
    assert (path.read_text(), other.read_text(), os.listdir(path.parent)) == ("text", "mine", ["file"])


def test_a_task_of_many_steps_is_told_once_and_how_far_it_is_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [Step(f"push {number}", ("true",), part="push 4 files to 1 host, 900 MB in all") for number in range(4)]
    plan, told = Plan(tuple((step,) for step in [STEP, *steps])), list[str]()
    monkeypatch.setattr(execute, "_PROGRESS_SECONDS", math.inf)
    run_plan(plan, told.append)
    assert told == ["make it", "push 4 files to 1 host, 900 MB in all"]
    monkeypatch.setattr(execute, "_PROGRESS_SECONDS", 0.0)
    told.clear()
    run_plan(plan, told.append)
    assert told[1:4] == [
        "push 4 files to 1 host, 900 MB in all",
        "push 4 files to 1 host, 900 MB in all: 1 of 4 done",
        "push 4 files to 1 host, 900 MB in all: 2 of 4 done",
    ]


def test_several_steps_on_a_host_count_as_one_host() -> None:
    steps, told = tuple(replace(STEP, host=host) for host in "aabb"), list[str]()
    run_plan(Plan((steps,), command_prefixes={"a": ("true",), "b": ("true",)}), told.append)
    assert told == ["make it (2 hosts)"]


@dataclass(frozen=True)
class ToyConfig:
    """Make a cluster of toys."""

    name: str = option("toys", "Name of the cluster")
    toys: int = option(2, "Number of toys")


class Toys(Provider[ToyConfig, bool]):
    """A cluster that is one file."""

    kind = "toy"

    def __init__(self, config: ToyConfig, environ: Mapping[str, str], entry: Entry | None = None) -> None:
        super().__init__(config, environ, entry)
        self.summary = f"{config.toys} toys"

    def gather(self) -> bool:
        return (self.directory / "cluster.json").exists()

    def plan(self, facts: bool) -> Plan:
        options = {"name": self.name, "toys": str(self.config.toys)}
        text = format_entry(Entry(self.name, self.kind, self.hostfile, options=options))
        step = plan_file(str(self.directory / "cluster.json"), text, "register the toys")
        return Plan() if facts else Plan(((step,),))

    def plan_down(self, facts: bool) -> Plan:
        files = {f"{self.directory}/cluster.json": ""}
        return Plan((plan_removal(files, str(self.directory), self.hostfile),)) if facts else Plan()

    def describe_hosts(self) -> list[str]:
        return ["a toy"] * self.config.toys


def test_a_name_is_not_given_to_a_cluster_of_another_kind(tmp_path: Path) -> None:
    cluster = Toys(ToyConfig(), {"CPUFT_STATE": str(tmp_path)})
    entry = Entry("toys", "toy", cluster.hostfile)
    for known in ("", format_entry(entry)):
        write_text(cluster.directory / "cluster.json", known)
        cluster.check()
    write_text(cluster.directory / "cluster.json", format_entry(replace(entry, kind="hosts")))
    with pytest.raises(CpuftError, match=r"^toys is a cluster of kind hosts already: .* cpuft provision down toys$"):
        cluster.check()


def test_a_new_kind_of_cluster_needs_its_module_and_one_line_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = click.Group(commands={**provision.commands})

    def run(*argv: str) -> str:
        done = CliRunner(env={"CPUFT_STATE": str(tmp_path / "state")}).invoke(group, argv, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    monkeypatch.setitem(PROVIDERS, "toy", Kind(f"{__name__}:Toys", ToyConfig))
    monkeypatch.chdir(tmp_path)
    group.add_command(make_verb("toy"))
    assert "Make a cluster of toys." in run("toy", "--help")
    assert "register the toys" in run("toy", "--dry-run")
    assert run("toy", "--toys", "3").startswith("cluster toys: 3 toys")
    assert run("status", "toys").count("  a toy\n") == 3
    assert run("diff", "toys") == "cluster toys is as it was asked for\n"
    assert run("down", "toys") == "cluster toys was removed\n"
    assert run("status").startswith("There is no cluster")
