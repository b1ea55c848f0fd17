"""The short form of scripts/check-fuzz, and that it can fail."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import strategies as st

from cpuft.errors import CpuftError
from tests.fuzz import sandbox
from tests.fuzz.exempt import EXEMPT
from tests.fuzz.parsers import PARSERS, Parser
from tests.fuzz.run import NONE, Faults, check_parser, fuzz
from tests.provision.simulated import needs_root

REPOSITORY = Path(__file__).parents[1]


def in_the_room(*words: str) -> subprocess.CompletedProcess[str]:
    command = sandbox.enter_command([sys.executable, *words])
    return subprocess.run(command, capture_output=True, text=True, timeout=580, cwd=REPOSITORY, check=False)


@needs_root
@pytest.mark.alone
def test_some_hundreds_of_inputs() -> None:
    """The runs of other tests write to the user's cache folder, which these inputs must not change."""
    done = in_the_room("-m", "scripts.benchmarks.check_fuzz", "--inside", "--inputs", "200", "--seed", "1")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_it_refuses_to_run_anywhere_else() -> None:
    command = [sys.executable, "-m", "scripts.benchmarks.check_fuzz", "--inside", "--inputs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY, check=False)
    assert done.returncode == 1
    assert "this is not its room" in done.stderr


@needs_root
def test_nothing_else_can_be_written_in_the_room() -> None:
    script = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('')"
    for path in (REPOSITORY / "x", Path.home() / "x", Path("/etc/x"), Path("/proc/sys/kernel/hostname")):
        assert "Read-only file system" in in_the_room("-c", script, str(path)).stderr
    assert in_the_room("-c", script, str(sandbox.OUTSIDE / "x")).returncode == 0
    assert not (sandbox.OUTSIDE / "x").exists()


@needs_root
def test_what_changes_around_the_root_is_seen() -> None:
    script = """if True:
        from tests.fuzz.run import check_verb
        from tests.fuzz.sandbox import OUTSIDE, prepare, snapshot_near
        from tests.fuzz.verbs import Case
        prepare()
        outside = snapshot_near()
        (OUTSIDE / "a" / "v" / "keep").write_text("x")
        print(check_verb(Case(("--version",)), outside))
        print(check_verb(Case(("--version",)), outside))
    """
    said = in_the_room("-c", script).stdout
    assert said == f"('changed outside of its room', '{sandbox.OUTSIDE}/a/v/keep')\n{NONE}\n"


def _divide(text: str) -> float:
    if "\n" in text:
        raise CpuftError(text)
    return 1 / len(text.strip("a"))


def test_a_fault_is_found_counted_and_cut_short() -> None:
    assert check_parser(Parser(_divide, st.text()), "b") == NONE
    faults = Faults()
    for text in ("aaaaaaaa", "aa", "b"):
        faults.note(text, lambda text: check_parser(Parser(_divide, st.text()), text))
    [(kind, (times, said, first))] = faults.found.items()
    assert kind.startswith("ZeroDivisionError at test_fuzz.py:")
    assert (times, said, first, faults.inputs) == (2, "division by zero", "", 3)


def _list_parsers() -> set[str]:
    """Names of all functions of modules that read something."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (REPOSITORY / "cpuft").rglob("*.py")]
    functions = [node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {name for name in functions if name.startswith(("parse_", "read_", "load_"))}


def test_every_parser_is_there() -> None:
    fuzzed = {name.partition(" of ")[0] for name in PARSERS}
    assert _list_parsers() - fuzzed == set(EXEMPT)


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_parser_takes_a_few_texts(name: str) -> None:
    faults = Faults()
    fuzz(PARSERS[name].texts, lambda text: check_parser(PARSERS[name], text), 5, 0, faults)
    assert faults.found == {}
