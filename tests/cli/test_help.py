"""Help that can be scanned, and shells that complete it."""

from __future__ import annotations

import copy
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from cpuft.cli import VERBS as SENTENCES
from cpuft.cli import cli
from cpuft.cli.options import CONFIG_FILE
from cpuft.config.fields import SECTIONS
from cpuft.record import FILE_NAME
from cpuft.tasks import TASKS
from tests.conftest import Golden, run_cpuft


def verbs(group: click.Group, name: str = "cpuft") -> Iterator[tuple[str, click.Command]]:
    """All verbs under their full names, groups among them."""
    yield name, group
    for word in group.list_commands(click.Context(group)):
        found = group.get_command(click.Context(group), word)
        assert found is not None
        yield from verbs(found, f"{name} {word}") if isinstance(found, click.Group) else [(f"{name} {word}", found)]


VERBS = dict(verbs(cli))


def help_of(name: str) -> str:
    """What `NAME --help` prints on a terminal of 80 columns."""
    command = copy.copy(VERBS[name])
    command._help_option = None  # click keeps the first that it made, whatever the names were then
    context = click.Context(command, info_name=name, terminal_width=78, help_option_names=["-h", "--help"])
    return context.get_help() + "\n"


@pytest.mark.parametrize("name", SENTENCES)
def test_the_sentence_in_the_list_of_verbs_begins_the_help_of_the_verb(name: str) -> None:
    assert VERBS[f"cpuft {name}"].get_short_help_str(1000) == SENTENCES[name]


@pytest.mark.parametrize("name", ["cpuft", "cpuft launch"])
def test_the_help(name: str, golden: Golden) -> None:
    golden(f"help-{name.split()[-1]}.txt", help_of(name))


def test_only_help_all_shows_rare_options() -> None:
    usual, rare = (run_cpuft("launch", flag).stdout for flag in ("--help", "--help-all"))
    assert "--adam-beta1" not in usual
    assert usual.replace("--help-all", "") == rare.replace("--help-all", "").replace(
        rare[rare.index("Rare options:") : rare.index("Other options:")], ""
    )
    assert "--adam-beta1 N " in rare


@pytest.mark.parametrize(
    "name, said, unsaid",
    [
        ("cpuft attach", "with which the run was started", "MPIJob"),
        ("cpuft runs", "all detached runs started from this machine", "MPIJob"),
        ("cpuft compare", "Folder for the reports and one folder per run", "Folder for the record"),
        ("cpuft predict", "Folder of the run that computes embeddings", "Folder for the record"),
        ("cpuft bench comm", "Largest number of seconds of the measurement", "--resume"),
        ("cpuft submit slurm", "-- launch|sweep ...", "-- launch ..."),
        ("cpuft submit batch", "-- launch ...", "sweep"),
        ("cpuft mine", "Print the command that would be run", "AWS"),
        ("cpuft provision hosts", "(default: your user name on this machine)", "from your ssh configuration"),
        ("cpuft provision extend", "it logs in to the instances", "--region"),
    ],
)
def test_a_verb_says_what_a_shared_option_means_there(name: str, said: str, unsaid: str) -> None:
    text = " ".join(help_of(name).split())
    assert said in text
    assert unsaid not in text


@pytest.mark.parametrize("name", ["cpuft launch", "cpuft compare", "cpuft env", "cpuft bench comm"])
def test_every_option_has_a_subject(name: str) -> None:
    options = [param for param in VERBS[name].params if isinstance(param, click.Option)]
    others = {"--dry-run", "--config", "--help-all"}
    assert {getattr(option, "section", "") or option.opts[0] for option in options} <= {*SECTIONS, *others}
    _, end = help_of(name).split("\nOther options:\n")
    assert end.count("\n  -") <= 3


@pytest.mark.parametrize("name", [name for name, verb in VERBS.items() if CONFIG_FILE in verb.params])
def test_a_file_of_options_names_them_as_their_flags_do(name: str) -> None:
    options = [param for param in VERBS[name].params if isinstance(param, click.Option)]
    assert [option.name for option in options] == [option.opts[0][2:].replace("-", "_") for option in options]


@pytest.mark.parametrize("name", VERBS)
def test_no_sentence_is_cut_off_and_nothing_is_noise(name: str) -> None:
    text = help_of(name)
    assert "..." not in text.partition("\nCommands:\n")[2]
    assert not any(noise in text for noise in ("x>=", "[default", "no-no", "INTEGER", "FLOAT"))
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "line, offered",
    [
        ("cpuft lau", {"launch"}),
        ("cpuft provision st", {"status"}),
        ("cpuft launch --task m", {"mrpc", "mnli"}),
        ("cpuft launch --task ", set(TASKS)),
        ("cpuft launch --batch", {"--batch-size"}),
        ("cpuft compare --np 1,2 --scaling ", {"weak", "strong"}),
        ("cpuft launch --num_train_epochs 3 --lr-schedule li", {"linear"}),
        ("cpuft launch --config none.yaml --lr-schedule li", {"linear"}),
    ],
)
def test_bash_completes(line: str, offered: set[str]) -> None:
    words = line.split(" ")
    script = f"""
eval "$(_CPUFT_COMPLETE=bash_source cpuft)"
COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1}
_cpuft_completion cpuft
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True, env={**os.environ, "PATH": path}
    )
    assert (set(done.stdout.split()), done.stderr) == (offered, "")


@pytest.mark.parametrize(
    "line, offered",
    [
        ("cpuft report ", {"runs/demo-np1", "runs/demo-compare/np-1"}),
        ("cpuft report runs/demo-np1 ru", {"runs/demo-np1", "runs/demo-compare/np-1"}),
        ("cpuft estimate runs/demo-n", {"runs/demo-np1"}),
        ("cpuft predict runs/demo-c", {"runs/demo-compare/np-1"}),
        ("cpuft stacks runs/demo-compare/", {"runs/demo-compare/np-1"}),
    ],
)
def test_runs_are_completed(line: str, offered: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ("runs/demo-np1", "runs/demo-compare/np-1", "runs/other"):
        Path(run).mkdir(parents=True)
    Path("runs/demo-np1", FILE_NAME).touch()
    Path("runs/demo-compare/np-1/plan.sh").touch()
    *words, last = line.split(" ")[1:]
    complete = ShellComplete(cli, {}, "cpuft", "_CPUFT_COMPLETE")
    assert {item.value for item in complete.get_completions(words, last)} == offered


@pytest.mark.parametrize("flag, kind", [("--hostfile", "file"), ("--data-dir", "dir"), ("--config", "file")])
def test_paths_are_the_shell_s_to_complete(flag: str, kind: str) -> None:
    (option,) = (param for param in VERBS["cpuft launch"].params if flag in param.opts)
    assert [item.type for item in option.shell_complete(click.Context(VERBS["cpuft launch"]), "ho")] == [kind]
